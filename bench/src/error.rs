//! Why a run came to nothing.

/// A `Result` whose error is an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a run came to nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The queue or the database said no.
    #[error(transparent)]
    Queue(#[from] posthouse::Error),
    /// The private server did not start.
    #[error(transparent)]
    Server(#[from] posthouse::private_postgres::Error),
    /// A scenario did not get to its end.
    #[error("{0}")]
    Stuck(String),
}

impl From<tokio_postgres::Error> for Error {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Queue(error.into())
    }
}
