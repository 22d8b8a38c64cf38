//! HTTP/1.1 connections to one provider: opened, used for one request at a time, kept for a while, closed.
//!
//! Thousands of calls wait at the same time, each on a connection, so what a call holds counts: no layers for redirects or
//! retries, which a call must not have anyway.

mod client;
mod connector;
mod error;
mod pool;
mod response;

pub(crate) use client::{AGENT, Client};
pub(crate) use connector::proxy;
pub(crate) use error::NoAnswer;
pub(crate) use response::Response;
