//! Where the database is: the parsed connection URL, and a second one for LISTEN where a pooler stands before the first.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};

use crate::error::{Error, Result};

/// Where the database is. Cheap to clone; does no I/O; its `Debug` shows no password.
#[derive(Clone)]
pub struct Database {
    pub(super) main: Target,
    pub(super) listen: Option<Target>,
    answered: Arc<Mutex<Option<Instant>>>,
}

/// A parsed URL.
#[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "only TLS reads how to check certificates"))]
#[derive(Clone)]
pub(super) struct Target {
    pub(super) config: Config,
    pub(super) verify: bool,
    pub(super) root_cert: Option<String>,
}

impl Database {
    /// Parse a connection URL (`postgres://user:password@host:port/database?sslmode=require`) or a key-value string. `sslmode`
    /// may be `disable`, `prefer` (the default), `require` (encrypted, the certificate not checked, as in libpq),
    /// `verify-ca` or `verify-full` (both check certificate and name), with `sslrootcert=FILE` for an authority of your own.
    /// A directory as host (`postgres://user@/database?host=/run/postgresql`) is that of a socket, where `sslmode` means nothing.
    pub fn new(url: &str) -> Result<Self> {
        let main = Target::parse(url)?;
        Ok(Self { listen: Some(main.clone()), main, answered: Arc::default() })
    }

    /// Since Postgres did what a call of this process asked for, over this or a clone of it. `None`: it never did.
    pub fn answer_age(&self) -> Option<Duration> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner).map(|at| at.elapsed())
    }

    /// It did just now.
    pub(super) fn note_answer(&self) {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Another URL for LISTEN, which does not work through a transaction-mode pooler. `None`: do not listen, just poll.
    pub fn listen_url(mut self, url: Option<&str>) -> Result<Self> {
        self.listen = url.map(Target::parse).transpose()?;
        Ok(self)
    }
}

impl Target {
    fn parse(url: &str) -> Result<Self> {
        let mut verify = false;
        let mut root_cert = None;
        let url = take_parameter(url, "sslmode", |mode| {
            verify = mode.starts_with("verify-");
            Some(if verify { "require" } else { mode }.to_owned())
        });
        let url = take_parameter(&url, "sslrootcert", |file| {
            root_cert = Some(file.to_owned());
            None
        });
        let mut config: Config = url.parse().map_err(|error: tokio_postgres::Error| {
            let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            Error::config(format!(
                "database URL: {why}; it should look like postgres://user:password@host:5432/database"
            ))
        })?;
        let has_socket = config.get_hosts().iter().any(|host| matches!(host, Host::Unix(_)));
        let has_network = config.get_hosts().iter().any(|host| matches!(host, Host::Tcp(_)));
        if has_socket && !has_network {
            // Postgres speaks TLS over networks only. As in libpq, whatever was asked for.
            config.ssl_mode(SslMode::Disable);
            verify = false;
        }
        if cfg!(not(feature = "tls")) && verify {
            return Err(Error::config("database URL: sslmode=verify-… needs the feature `tls` of the crate posthouse"));
        }
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(Duration::from_secs(10));
        }
        config.keepalives_idle(Duration::from_secs(30));
        config.tcp_user_timeout(Duration::from_secs(30));
        Ok(Self { config, verify, root_cert })
    }
}

impl Target {
    /// Where it is, for people: the hosts with their ports, and nothing that is secret.
    pub(super) fn place(&self) -> String {
        let ports = self.config.get_ports();
        let port = |at: usize| ports.get(at).or(ports.first()).copied().unwrap_or(5432);
        let place = |(at, host): (usize, &Host)| match host {
            Host::Tcp(name) if name.contains(':') => format!("[{name}]:{}", port(at)),
            Host::Tcp(name) => format!("{name}:{}", port(at)),
            Host::Unix(folder) => format!("{}/.s.PGSQL.{}", folder.display(), port(at)),
        };
        let places: Vec<_> = self.config.get_hosts().iter().enumerate().map(place).collect();
        places.join(", ")
    }
}

/// Hand the value of a parameter of a URL or key-value string to `change`, and put back what it answers.
fn take_parameter(url: &str, name: &str, change: impl FnOnce(&str) -> Option<String>) -> String {
    let key = format!("{name}=");
    let Some(start) = url.find(&key).filter(|&i| i == 0 || matches!(url.as_bytes()[i - 1], b'?' | b'&' | b' ')) else {
        return url.to_owned();
    };
    let value_start = start + key.len();
    let end = url[value_start..].find(['&', ' ']).map_or(url.len(), |n| value_start + n);
    match change(&url[value_start..end]) {
        Some(value) => format!("{}{}{}", &url[..value_start], value, &url[end..]),
        // Take its separator along.
        None if end < url.len() => format!("{}{}", &url[..start], &url[end + 1..]),
        None => url[..start].trim_end_matches(['?', '&', ' ']).to_owned(),
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Database")
            .field("hosts", &self.main.config.get_hosts())
            .field("ports", &self.main.config.get_ports())
            .field("database", &self.main.config.get_dbname())
            .field("user", &self.main.config.get_user())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn tls_parameters_are_ours() {
        let db =
            Database::new("postgres://u:p@h/d?sslmode=verify-full&sslrootcert=/ca.pem&application_name=x").unwrap();
        assert!(db.main.verify);
        assert_eq!(db.main.root_cert.as_deref(), Some("/ca.pem"));
        assert_eq!(db.main.config.get_application_name(), Some("x"));
        assert!(!Database::new("host=h sslmode=require").unwrap().main.verify);
        assert!(Database::new("postgres://u@h/d?sslrootcert=/ca.pem").is_ok());
    }

    #[test]
    fn sockets_have_no_tls() {
        for (url, mode) in [
            ("postgres://u@/d?host=/tmp/x&sslmode=verify-full", SslMode::Disable),
            ("postgres://u@%2Ftmp%2Fx/d", SslMode::Disable),
            ("host=/tmp/x sslmode=require", SslMode::Disable),
            ("host=/tmp/x,far sslmode=require", SslMode::Require),
            ("host=far", SslMode::Prefer),
        ] {
            assert_eq!(Database::new(url).unwrap().main.config.get_ssl_mode(), mode, "{url}");
        }
    }

    #[test]
    fn the_place_is_told_without_the_password() {
        for (url, place) in [
            ("postgres://u:sesame@h/d", "h:5432"),
            ("postgres://u:sesame@h:1,[::1]:2/d", "h:1, [::1]:2"),
            ("host=/tmp/x,far port=6000 password=sesame", "/tmp/x/.s.PGSQL.6000, far:6000"),
        ] {
            assert_eq!(Database::new(url).unwrap().main.place(), place, "{url}");
        }
    }

    #[test]
    fn a_bad_url_says_what_it_should_be_and_debug_hides_the_password() {
        let error = Database::new("postgres://h:notaport/d").unwrap_err().to_string();
        assert!(error.contains("postgres://user"), "{error}");
        assert!(!format!("{:?}", Database::new("postgres://u:sesame@h/d").unwrap()).contains("sesame"));
    }
}
