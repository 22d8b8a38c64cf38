//! The commands as a person or a script meets them: the real binary, on a database of each test's own.

#![allow(clippy::unwrap_used)]

mod alerts;
mod arguments;
mod bulk;
mod db;
mod dead;
mod enqueue;
mod gates;
mod guards;
mod jobs;
mod jsonl;
mod provider;
mod queues;
mod schedules;
mod support;
mod usage;
