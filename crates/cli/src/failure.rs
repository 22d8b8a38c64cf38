//! How a command ends badly: what happened, and what to do next.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use crate::style::{BAD, HINT, clean_lines};

/// A `Result` whose error is a [`Failure`].
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// Why a command failed, for the person who typed it.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    hint: Option<String>,
    code: u8,
    /// Nobody reads the output any more, as in `posthouse job list | head -1`: no reason to complain.
    quiet: bool,
}

impl Failure {
    /// Something went wrong: exit code 1.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, code: 1, quiet: false }
    }

    /// What was typed cannot be right: exit code 2.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { code: 2, ..Self::new(message) }
    }

    /// What to do next.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Another exit code.
    pub(crate) fn code(self, code: u8) -> Self {
        Self { code, ..self }
    }

    /// Tell, on stderr, and answer with the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        if self.quiet {
            return ExitCode::SUCCESS;
        }
        // If stderr is closed too, the exit code is all there is left to say.
        let _ = writeln!(anstream::stderr().lock(), "{self}");
        ExitCode::from(self.code)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{BAD}error:{BAD:#} {}", clean_lines(&self.message))?;
        if let Some(hint) = &self.hint {
            for line in hint.lines() {
                write!(f, "\n{HINT} hint:{HINT:#} {line}")?;
            }
        }
        Ok(())
    }
}

impl From<posthouse::Error> for Failure {
    fn from(error: posthouse::Error) -> Self {
        let hint = match error.sqlstate() {
            Some("28P01" | "28000") => Some("check user and password in DATABASE_URL or --database-url"),
            Some("3D000") => {
                Some("create the database first, as with `createdb NAME`, or correct the name in DATABASE_URL")
            }
            Some("57014") => Some(
                "if that is too short a statement_timeout of the database: add `?options=-c%20statement_timeout%3D0` to its URL",
            ),
            Some("42501") if error.to_string().starts_with("permission denied") => Some(
                "the database user lacks rights on the schema posthouse; use the user that owns it, or one with the role that \
                 this takes, as made by `posthouse db isolate`",
            ),
            _ if error.to_string().contains("for type timestamp with time zone") => Some(
                "write a time that Postgres reads, such as '2027-01-31 08:00' or yesterday; where an age is taken, also 2h or 30d",
            ),
            _ if error.is_disconnected() => Some(
                "is Postgres running at the address in DATABASE_URL? `posthouse dev` starts one of its own for development",
            ),
            _ => None,
        };
        let message = error.to_string();
        let failure = if error.is_config() || error.is_invalid() { Self::usage(message) } else { Self::new(message) };
        match hint {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let quiet = error.kind() == io::ErrorKind::BrokenPipe;
        Self { quiet, ..Self::new(error.to_string()) }
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        match error.io_error_kind() {
            Some(kind) => io::Error::from(kind).into(),
            None => Self::new(format!("not valid JSON: {error}")),
        }
    }
}
