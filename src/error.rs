//! The one error type of the library, opaque, with predicates for what a caller may want to decide on.

use std::fmt;

/// A `Result` whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Something went wrong. Ask the `is_…` methods what to do about it; the text is for people.
pub struct Error {
    kind: Kind,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    /// Bad input: a name, number or payload that cannot be taken.
    Invalid,
    /// No connection, or the connection broke. `down` says that the server itself refused.
    Disconnected { down: bool },
    /// Postgres answered with an error.
    Sql { code: String },
    /// Schema and binary do not fit together.
    Schema,
    /// Settings that would be unsafe to run with.
    Config,
    /// A queue or tenant has as many waiting jobs as it may: whose limit it is, and for how many there is room.
    Full { scope: String, name: String, room: usize },
}

impl Error {
    /// Bad input, with a message that names the field.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self { kind: Kind::Invalid, message: message.into(), source: None }
    }

    /// Settings that would be unsafe to run with.
    pub fn config(message: impl Into<String>) -> Self {
        Self { kind: Kind::Config, message: message.into(), source: None }
    }

    pub(crate) fn schema(message: impl Into<String>) -> Self {
        Self { kind: Kind::Schema, message: message.into(), source: None }
    }

    pub(crate) fn disconnected(message: impl Into<String>, down: bool) -> Self {
        Self { kind: Kind::Disconnected { down }, message: message.into(), source: None }
    }

    /// The same error once more, for another who waits for the same answer.
    pub(crate) fn again(&self) -> Self {
        Self { kind: self.kind.clone(), message: self.message.clone(), source: None }
    }

    /// The input was refused: nothing was stored, and the same call would be refused again.
    pub fn is_invalid(&self) -> bool {
        match &self.kind {
            Kind::Invalid => true,
            Kind::Sql { code } => code == "PH001",
            _ => false,
        }
    }

    /// A setting that cannot be right, the database URL among them: nothing was begun.
    pub fn is_config(&self) -> bool {
        self.kind == Kind::Config
    }

    /// There was no connection, or it broke before the answer came: the statement may or may not have taken effect.
    pub fn is_disconnected(&self) -> bool {
        matches!(self.kind, Kind::Disconnected { .. })
    }

    /// The server itself refused (nothing listens at its address, it is starting up or shutting down, or it is
    /// read-only): at this moment nobody can write to this database.
    pub fn is_server_down(&self) -> bool {
        match &self.kind {
            Kind::Disconnected { down } => *down,
            Kind::Sql { code } => code == "25006",
            _ => false,
        }
    }

    /// Postgres is away, or has no connection to give.
    pub(crate) fn is_away(&self) -> bool {
        const TOO_MANY_CONNECTIONS: &str = "53300";
        self.is_disconnected() || self.is_server_down() || self.sqlstate() == Some(TOO_MANY_CONNECTIONS)
    }

    /// Worth trying again: the connection broke, or Postgres could not do it just now (deadlock, serialization
    /// failure, lock or statement timeout, too many connections, shutdown, read-only server).
    pub fn is_transient(&self) -> bool {
        match &self.kind {
            Kind::Disconnected { .. } => true,
            Kind::Sql { code } => {
                matches!(code.as_str(), "40001" | "40P01" | "55P03" | "57014" | "25006" | "PH007")
                    || code.starts_with("53")
                    || code.starts_with("57P")
                    || code.starts_with("08")
            }
            _ => false,
        }
    }

    /// Postgres undid the statement because of others (deadlock, serialization failure, a dedupe key that changed hands). In a
    /// transaction of yours: run that again, whole, from its first statement. Statements of the library's own are run again by it.
    pub fn is_rolled_back(&self) -> bool {
        matches!(self.sqlstate(), Some("40001" | "40P01" | "PH007"))
    }

    /// A dedupe key is held by another job, and the policy asked for a refusal: nothing was stored. The message names that job.
    pub fn is_duplicate(&self) -> bool {
        matches!(self.sqlstate(), Some("PH008" | "PH009"))
    }

    /// As many jobs wait in the queue, or of the tenant, as may: nothing was stored. Enqueue again when some have run.
    pub fn is_full(&self) -> bool {
        matches!(self.kind, Kind::Full { .. })
    }

    /// This database is a copy of another, and nobody has said that its jobs are to be run here: see `posthouse db adopt`.
    pub fn is_copy(&self) -> bool {
        self.sqlstate() == Some("PH011")
    }

    /// Whose limit an enqueue met, as (`queue` or `tenant`, name), and how many more jobs there is room for.
    pub(crate) fn full(&self) -> Option<(&str, &str, usize)> {
        match &self.kind {
            Kind::Full { scope, name, room } => Some((scope, name, *room)),
            _ => None,
        }
    }

    /// The same with another text.
    pub(crate) fn saying(mut self, message: impl Into<String>) -> Self {
        self.message = message.into();
        self
    }

    /// The schema in the database and this binary do not fit together.
    pub fn is_schema_mismatch(&self) -> bool {
        self.kind == Kind::Schema
    }

    /// The SQLSTATE, where Postgres answered with an error. The ones of Posthouse start with `PH`.
    pub fn sqlstate(&self) -> Option<&str> {
        match &self.kind {
            Kind::Sql { code } => Some(code),
            Kind::Full { .. } => Some("PH010"),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e.as_ref() as &(dyn std::error::Error + 'static))
    }
}

impl From<tokio_postgres::Error> for Error {
    fn from(error: tokio_postgres::Error) -> Self {
        if let Some(db) = error.as_db_error() {
            let code = db.code().code().to_owned();
            let mut message = db.message().to_owned();
            for more in [db.detail(), db.hint()].into_iter().flatten() {
                message.push_str(if message.ends_with('.') { " " } else { ". " });
                message.push_str(more);
            }
            // The connection is gone with these. A backend that was terminated (57P01) says nothing about the server.
            let kind = match code.as_str() {
                "57P01" => Kind::Disconnected { down: false },
                "57P02" | "57P03" => Kind::Disconnected { down: true },
                "PH010" => Kind::Full {
                    scope: db.table().unwrap_or_default().to_owned(),
                    name: db.constraint().unwrap_or_default().to_owned(),
                    room: db.detail().and_then(room).unwrap_or(0),
                },
                _ => Kind::Sql { code },
            };
            return Self { kind, message, source: None };
        }
        // Postgres answered, but not what this binary expects; the driver tells such errors apart in their text only.
        let text = error.to_string();
        if ["error deserializing", "error serializing", "invalid column", "expected "]
            .iter()
            .any(|t| text.starts_with(t))
        {
            let why = std::error::Error::source(&error).map_or_else(String::new, |source| format!(": {source}"));
            let message = format!("the schema does not fit this binary: {text}{why}");
            return Self { kind: Kind::Schema, message, source: None };
        }
        let down = refused(&error);
        let message = match std::error::Error::source(&error) {
            Some(source) => format!("no connection to Postgres: {error}: {source}"),
            None => format!("no connection to Postgres: {error}"),
        };
        Self { kind: Kind::Disconnected { down }, message, source: Some(Box::new(error)) }
    }
}

/// The number in "Room for 3 more."
fn room(detail: &str) -> Option<usize> {
    detail.split(' ').find_map(|word| word.parse().ok())
}

/// Nothing listens at the address: the server is down, which is more than "it cannot be reached".
fn refused(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(e) = next {
        if let Some(io) = e.downcast_ref::<std::io::Error>() {
            return matches!(io.kind(), std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound);
        }
        next = e.source();
    }
    false
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Self { kind: Kind::Invalid, message: format!("not valid JSON: {error}"), source: Some(Box::new(error)) }
    }
}
