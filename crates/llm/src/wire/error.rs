//! Why there is no answer at all. No text in it holds an address or a key.

use std::error::Error;

/// Where a request failed that nobody answered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoAnswer {
    /// There was no connection to send it on.
    #[error("cannot connect")]
    Connect(#[source] Box<dyn Error + Send + Sync>),
    /// There was none in time.
    #[error("no connection in time")]
    ConnectTimeout,
    /// There was one, and nothing that could be read as an answer came back on it.
    #[error("no answer")]
    Exchange(#[source] hyper::Error),
}
