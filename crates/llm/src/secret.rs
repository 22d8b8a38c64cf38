//! A secret is a value that no log, error, panic or dump can show: only the code that sends it may look inside.

use serde::Deserialize;
use std::fmt;

/// A key, password or header value. `Debug` and `Display` show `[secret]`, whatever is inside.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Wraps a value; surrounding white space (the newline at the end of a key file) is dropped.
    #[must_use]
    pub fn new(value: &str) -> Self {
        Self(value.trim().to_owned())
    }

    /// The value itself, to be sent and never to be formatted.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_formats_the_value() {
        let secret = Secret::new("  sk-very-secret\n");
        assert_eq!(secret.expose(), "sk-very-secret");
        assert_eq!(format!("{secret} {secret:?} {:#?}", Some(&secret)).matches("sk-").count(), 0);
    }
}
