//! What is wrong with a configuration: where, and what to do about it.

/// A mistake in the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {problem}")]
pub struct ConfigError {
    /// The file and key it is about.
    pub place: String,
    /// What is wrong and what to do.
    pub problem: String,
}

impl ConfigError {
    pub(crate) fn new(place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { place: place.into(), problem: problem.into() }
    }
}
