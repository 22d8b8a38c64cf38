//! The only module that speaks SQL. A file a verb, named like the file under `sql/functions/` whose functions it calls.
//!
//! A [`Store`] is one connection, made at the first call and again after it broke. Calls are pipelined on it, each is one
//! statement in one flight, so that nothing is left open when a caller's future is dropped, and a transaction-mode
//! pooler between us and Postgres cannot mix up anything.

mod adopt;
mod alert;
mod apply;
mod claim;
mod connection;
mod database;
mod dead_letter;
mod depth;
mod doctor;
mod enqueue;
mod gate;
mod gauge;
mod inspect;
mod isolation;
mod lease;
mod listen;
mod locks;
mod migrate;
mod operate;
mod retention;
mod schedule;
mod settle;
mod surroundings;
mod sweep;
#[cfg(feature = "tls")]
mod tls;
mod usage;

pub use adopt::Origin;
pub use alert::{
    AlertChange, AlertData, AlertMessage, AlertRecord, AlertRule, WEBHOOK_KIND, WEBHOOK_QUEUE, WebhookState,
};
pub use apply::{Progress, migrate, migrate_telling};
pub use claim::{ClaimedJob, NextDue, Registration};
pub use connection::Store;
pub use database::Database;
pub use dead_letter::{DeadLetter, Redrive};
pub use depth::{DepthLimit, DepthOf};
pub use doctor::{Diagnosis, Examination, Finding, Severity, examine};
pub use gate::{Closure, EndpointVerdict, GateLimits, GateRecord, TenantRecord};
pub use gauge::FleetMetrics;
pub use inspect::{JobFilter, JobRecord, QueueHealth, WorkerRecord};
pub use isolation::{Isolation, isolate, isolate_telling};
pub use lease::{Beat, Pulse};
pub use listen::{Listener, Notice};
pub use locks::Blocker;
pub use migrate::{Migration, SchemaStatus, schema_sql, schema_status};
pub use operate::{Action, Batch, Reason, Refused, Selection};
pub use retention::{Ended, QueueSettings, Retention, Retired};
pub use schedule::{CatchUp, Schedule, ScheduleChange, ScheduleRecord, ScheduleRun};
pub(crate) use schedule::{DueSchedule, Firing};
pub use settle::{Settled, Settlement, Verdict};
pub use sweep::{FailedSweep, Rescued, SweepRecord, Tidied, WorkerBeat};
pub use usage::{UsageBy, UsageFilter, UsageReport, UsageRow};

pub(crate) use enqueue::{EnqueueCall, MANY_MAX, enqueue_in};
