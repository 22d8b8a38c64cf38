//! The commands that stay up, with real processes: what they print, what they leave behind when they end, however they end.

#![allow(clippy::unwrap_used)]

mod alerts;
mod bench;
mod bench_over_time;
mod bench_shapes;
mod demo;
mod deploy;
mod dev;
mod gates;
mod line;
mod logs;
mod metrics;
mod processes;
mod prompts;
mod receiver;
// Shared with the tests of the other commands; not all of it is needed here.
#[allow(dead_code)]
#[path = "../commands/support.rs"]
mod support;
mod traces;
mod work;
