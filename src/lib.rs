//! Posthouse: a Postgres job queue that LLM agents can depend on.
//!
//! The modules, in reading order: [`job`] (what is enqueued), [`outcome`] (what an attempt decides),
//! [`retry`] (when the next attempt runs), [`cron`] (when schedules are due), [`client`] (enqueue and manage jobs),
//! [`handler`] and [`context`] (what your code sees), [`admission`] (gates that calls of a handler pass), [`worker`] (claims jobs and runs
//! handlers), [`metrics`] (what a worker counts),
//! [`store`] (the only module that speaks SQL), [`error`].

pub mod admission;
pub mod client;
pub mod context;
pub mod cron;
pub mod error;
mod event;
pub mod handler;
mod interrupt;
pub mod job;
mod lease;
pub mod metrics;
pub mod outcome;
mod pause;
#[cfg(feature = "private-postgres")]
pub mod private_postgres;
pub mod retry;
mod signal;
pub mod store;
pub mod sweep;
#[cfg(feature = "testing")]
pub mod testing;
pub mod trace;
pub mod worker;

pub use client::Posthouse;
pub use context::Context;
pub use error::{Error, Result};
pub use job::{Enqueued, Job, NewJob};
pub use outcome::{JobError, Outcome};
pub use worker::Worker;

/// The README's Rust compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
