//! The integration tests, one binary: real processes against a Postgres that the tests start themselves.

#![allow(clippy::unwrap_used)]

mod client;
mod core;
mod crash;
mod examples;
mod fault_proxy;
mod harness;
mod other_drivers;
mod pooler;
mod private_postgres;
mod program;
mod structure;
mod sweeper;
mod test_cluster;
mod unix_socket;
mod worker_ahead;
mod worker_gates;
mod worker_lease;
mod worker_reconcile;
mod worker_run;
mod worker_settle;
mod worker_shutdown;
mod worker_support;
