//! LLM tasks for Posthouse: prompt kinds, providers, error classes, and a simulated provider.
//!
//! A prompt kind turns a job's payload into one request to an OpenAI-compatible endpoint and its answer into a result;
//! this crate knows nothing of queues until `handler` registers the kinds on a worker. Reading order:
//!
//! 1. `config`: what `posthouse.toml` may say; `engine`: all of it made ready.
//! 2. `prompt_kind` (with `template`, `body`, `schema`): from payload to request.
//! 3. `call` (with `transport`, `wire`, `clock`, `stream`): one HTTP request, its stream and its timeouts.
//! 4. `assembly`, `judge` and `answer`: what is an answer. `classify`, `hint`, `error`: what is a failure, and what to do about it.
//!    `price`: what it cost. `meter`: all of them counted.
//! 5. `route`, `attempt` and `hedge`: who is asked, and who next; `trail`: who was. `gate`: who was told "not now" does not ask
//!    again at once, and neither does anybody else. `secret`, `redact`: keys are seen by nobody.
//! 6. `handler`: the joint to the queue. `sim`: a provider that behaves as badly as told.

pub mod answer;
mod assembly;
mod attempt;
mod body;
mod call;
pub mod classify;
mod clock;
pub mod config;
mod engine;
pub mod error;
pub mod gate;
mod handler;
mod hedge;
pub mod hint;
mod http;
mod idempotency;
mod judge;
mod meter;
mod millis;
pub mod price;
mod prompt_kind;
pub mod redact;
mod route;
mod schema;
pub mod secret;
pub mod sim;
pub mod stream;
mod template;
mod text;
mod trace;
pub mod trail;
mod transport;
mod wire;

pub use answer::{Answer, Usage};
pub use call::ANSWER_BYTES_MAX;
pub use config::{Config, ConfigError};
pub use engine::{Attempt, Engine, KindGates};
pub use error::{CallError, ErrorClass, Verdict};
pub use gate::{DatabaseGates, EndpointGates, LocalGates};
pub use http::http_client;
pub use prompt_kind::{CHAT, SUMMARIZE};
pub use secret::Secret;
pub use text::SNIPPET_BYTES_MAX;
