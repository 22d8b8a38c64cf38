//! The way to one provider: its address, headers and connections; and what a lost connection means.

use crate::config::{ConfigError, HeaderSource, MaxTokensField, Provider};
use crate::error::{CallError, ErrorClass};
use crate::idempotency;
use crate::prompt_kind::Dialect;
use crate::secret::Secret;
use crate::wire::{self, Client, NoAnswer, Response};
use hyper::Uri;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::Url;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A name that does not exist will not exist in a second either, but it may after a deployment.
const UNKNOWN_HOST_WAIT: Duration = Duration::from_secs(60);
/// By then some of the calls that hold the sockets have ended.
const SHORTAGE_WAIT: Duration = Duration::from_secs(1);
/// Keeps the place of a call's key among the headers, so that it need not be made for every call.
const NO_KEY: HeaderValue = HeaderValue::from_static("");

pub(crate) struct Transport {
    client: Arc<Client>,
    url: Url,
    /// The header by which the provider knows a call again.
    idempotency: Option<HeaderName>,
    pub(crate) dialect: Dialect,
    /// Tells keys apart without showing them. `None`: it has none.
    pub(crate) key_mark: Option<String>,
}

/// The address may hold a password, so only the host is shown.
impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transport").field("host", &self.host()).finish_non_exhaustive()
    }
}

/// Looks up an environment variable; a parameter, so that tests need not change the environment of the process.
pub(crate) type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Transport {
    /// Prepares a provider: reads its keys and opens no connection. The secrets found go to `secrets`, for redaction.
    pub(crate) fn new(
        name: &str,
        provider: &Provider,
        connect: Duration,
        tls: &rustls::ClientConfig,
        (environment, folder): (Environment<'_>, &Path),
        secrets: &mut Vec<Secret>,
    ) -> Result<Self, ConfigError> {
        let place = |key: &str| format!("providers.{name}.{key}");
        let base =
            Url::parse(&provider.base_url).map_err(|error| ConfigError::new(place("base_url"), error.to_string()))?;
        let proxy = provider.proxy.as_deref().and_then(|proxy| Url::parse(proxy).ok());
        for url in [&base].into_iter().chain(&proxy) {
            secrets.extend(secrets_in(url));
        }
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let mut key_mark = None;
        if let Some((key, secret)) =
            api_key(provider, environment, folder).map_err(|(key, problem)| ConfigError::new(place(key), problem))?
        {
            let value = header_value(&format!("Bearer {}", secret.expose()))
                .map_err(|problem| ConfigError::new(place(key), problem))?;
            headers.insert(AUTHORIZATION, value);
            key_mark = Some(mark(&secret));
            secrets.push(secret);
        }
        for (header, source) in &provider.headers {
            let place = place(&format!("headers.{header}"));
            let secret =
                header_secret(source, environment, folder).map_err(|problem| ConfigError::new(&place, problem))?;
            let header: HeaderName = header.parse().map_err(|_| ConfigError::new(&place, "not a header name"))?;
            let value = header_value(secret.expose()).map_err(|problem| ConfigError::new(&place, problem))?;
            headers.insert(header, value);
            secrets.push(secret);
        }
        let idempotency = idempotency::header(provider.idempotency_header.as_deref(), &base)
            .map_err(|problem| ConfigError::new(place("idempotency_header"), problem))?;
        if let Some(header) = &idempotency {
            headers.entry(header).or_insert(NO_KEY);
        }
        let dialect = Dialect {
            max_tokens_field: provider.max_tokens_field.unwrap_or_else(|| usual_field(&base)),
            stream_usage: provider.stream_usage,
        };
        let url = chat_url(base);
        let address: Uri = without_user(url.clone())
            .as_str()
            .parse()
            .map_err(|_| ConfigError::new(place("base_url"), "not an address that requests can be sent to"))?;
        let proxy = wire::proxy(provider.proxy.as_deref(), &address)
            .map_err(|problem| ConfigError::new(place("proxy"), problem))?;
        let client = Arc::new(Client::new(address, headers, proxy.as_ref(), connect, tls));
        Ok(Self { client, url, idempotency, dialect, key_mark })
    }

    /// Sends a request; ready when status and headers of the answer are there.
    pub(crate) fn send(
        &self,
        body: bytes::Bytes,
        key: Option<&str>,
    ) -> impl Future<Output = Result<Response, NoAnswer>> + use<> {
        let mut headers = self.client.headers();
        if let Some(header) = &self.idempotency {
            match key.map(HeaderValue::from_str) {
                Some(Ok(key)) => _ = headers.insert(header, key),
                _ if headers.get(header) == Some(&NO_KEY) => _ = headers.remove(header),
                _ => {}
            }
        }
        self.client.post(headers, body)
    }

    /// Whether the provider is told when it has seen a call before.
    pub(crate) fn takes_key(&self) -> bool {
        self.idempotency.is_some()
    }

    /// Host and port, for messages: the part of the address that holds no secret.
    pub(crate) fn host(&self) -> String {
        let host = self.url.host_str().unwrap_or("?");
        self.url.port_or_known_default().map_or(host.to_owned(), |port| format!("{host}:{port}"))
    }
}

/// TLS with ring and the certificates of the system (or of `SSL_CERT_FILE`). None at all is no error here: plain http works without.
pub(crate) fn tls_config() -> Result<rustls::ClientConfig, ConfigError> {
    let mut roots = rustls::RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    let (added, _) = roots.add_parsable_certificates(found.certs);
    if added == 0 {
        tracing::warn!(
            "no root certificates found: https providers will be refused; install ca-certificates or set SSL_CERT_FILE"
        );
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| ConfigError::new("tls", error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth())
}

/// The parts of an address that may be keys: its password, a user without one, and what the query calls a key.
fn secrets_in(url: &Url) -> Vec<Secret> {
    let user = Some(url.username()).filter(|user| !user.is_empty());
    let mut secrets: Vec<Secret> = url.password().or(user).map(Secret::new).into_iter().collect();
    let is_key = |name: &str| {
        let name = name.to_ascii_lowercase();
        ["key", "token", "secret", "sig", "code", "auth", "pass"].iter().any(|word| name.contains(word))
    };
    secrets.extend(url.query_pairs().filter(|(name, _)| is_key(name)).map(|(_, value)| Secret::new(&value)));
    secrets
}

fn api_key(
    provider: &Provider,
    environment: Environment<'_>,
    folder: &Path,
) -> Result<Option<(&'static str, Secret)>, (&'static str, String)> {
    if let Some(key) = &provider.api_key {
        return Ok(Some(("api_key", key.clone())));
    }
    if let Some(name) = &provider.api_key_env {
        return from_environment(name, environment)
            .map(|secret| Some(("api_key_env", secret)))
            .map_err(|problem| ("api_key_env", problem));
    }
    if let Some(file) = &provider.api_key_file {
        return from_file(file, folder)
            .map(|secret| Some(("api_key_file", secret)))
            .map_err(|problem| ("api_key_file", problem));
    }
    Ok(None)
}

fn header_secret(source: &HeaderSource, environment: Environment<'_>, folder: &Path) -> Result<Secret, String> {
    match source {
        HeaderSource::Value(value) => Ok(value.clone()),
        HeaderSource::Env { env } => from_environment(env, environment),
        HeaderSource::File { file } => from_file(file, folder),
    }
}

fn from_environment(name: &str, environment: Environment<'_>) -> Result<Secret, String> {
    if let Some(value) = environment(name).filter(|value| !value.trim().is_empty()) {
        return Ok(Secret::new(&value));
    }
    // What is no usual name may be the key itself, put into the wrong place, and must not be shown.
    let is_usual = name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_');
    Err(if is_usual && !name.is_empty() {
        format!("the environment variable {name} is not set; export {name}=… before the start")
    } else {
        "no environment variable of this name is set; write the NAME of a variable here, such as \"OPENAI_API_KEY\", not the key itself".to_owned()
    })
}

fn from_file(file: &Path, folder: &Path) -> Result<Secret, String> {
    let path = folder.join(file);
    let text = std::fs::read_to_string(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let secret = Secret::new(&text);
    if secret.expose().is_empty() { Err(format!("{} is empty", path.display())) } else { Ok(secret) }
}

fn header_value(text: &str) -> Result<HeaderValue, String> {
    let mut value = HeaderValue::from_str(text)
        .map_err(|_| "has characters that no header can carry (a line break in the middle?)".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

/// A short mark of a key: 24 bits of a hash, far too few to find a key by and enough to tell some keys apart.
fn mark(secret: &Secret) -> String {
    let hash = secret
        .expose()
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{:06x}", (hash ^ (hash >> 32)) & 0xff_ffff)
}

/// `{base}/chat/completions`, with the query of the base.
fn chat_url(mut base: Url) -> Url {
    let path = format!("{}/chat/completions", base.path().trim_end_matches('/'));
    base.set_path(&path);
    base
}

/// Providers are not told who is named in an address, nor are proxies.
fn without_user(mut url: Url) -> Url {
    // Refused only where there is no host, and then nobody is named either.
    let _ = (url.set_username(""), url.set_password(None));
    url
}

fn usual_field(base: &Url) -> MaxTokensField {
    let host = base.host_str().unwrap_or("");
    if host == "api.openai.com" || host.ends_with(".openai.azure.com") {
        MaxTokensField::MaxCompletionTokens
    } else {
        MaxTokensField::MaxTokens
    }
}

/// What it means that no answer came at all.
pub(crate) fn connection_error(error: &NoAnswer, host: String) -> Box<CallError> {
    match error {
        NoAnswer::Exchange(error) => exchange_error(error, &host),
        NoAnswer::Connect(_) | NoAnswer::ConnectTimeout => {
            let mut failure = connect_error(error, &host);
            failure.was_sent = false;
            failure
        }
    }
}

/// The request was sent, and something else than an answer came back.
fn exchange_error(error: &hyper::Error, host: &str) -> Box<CallError> {
    let cause = root_cause(error);
    if answered_something_else(error) {
        let message = format!(
            "{host} answered with something that is not HTTP/1.1 ({cause}); check the host, the port, and http or https in base_url"
        );
        return CallError::new(ErrorClass::Incomplete, "not_http", message);
    }
    CallError::new(
        ErrorClass::Ambiguous,
        "connection_lost",
        format!(
            "{host} closed the connection after the request was sent and before an answer ({cause}); it may have been billed"
        ),
    )
}

/// There was nothing to send the request on.
fn connect_error(error: &NoAnswer, host: &str) -> Box<CallError> {
    let cause = root_cause(error);
    let has = |words: &[&str]| words.iter().any(|word| cause.to_ascii_lowercase().contains(word));
    if is_own_shortage(error.source()) {
        let cure = "allow this process more open files (ulimit -n), or give it less to do at once";
        let mut failure =
            CallError::new(ErrorClass::NotNow, "no_more_connections", format!("not asked: {cause}; {cure}"));
        failure.wait = Some(SHORTAGE_WAIT);
        return failure;
    }
    let is_late = |cause: &std::io::Error| cause.kind() == std::io::ErrorKind::TimedOut;
    if matches!(error, NoAnswer::ConnectTimeout)
        || causes(error.source()).any(|cause| cause.downcast_ref().is_some_and(is_late))
    {
        return CallError::new(
            ErrorClass::Transient,
            "connect_timeout",
            format!("{host} did not accept a connection in time"),
        );
    }
    if has(&["certificate", "unknownissuer", "notvalidforname"]) {
        return CallError::terminal(
            "tls_certificate",
            format!(
                "the certificate of {host} is not to be trusted: {cause}; correct base_url, the certificate, or SSL_CERT_FILE"
            ),
        );
    }
    if has(&["proxy auth", "407"]) {
        return CallError::terminal(
            "proxy_authentication",
            format!("the proxy wants a user and a password: {cause}; put them into the provider's proxy URL"),
        );
    }
    // The words of glibc, musl and macOS for "there is no such name", as against "ask again later".
    if has(&["name or service not known", "name does not resolve", "nodename nor servname", "no address associated"]) {
        let mut failure = CallError::new(
            ErrorClass::Transient,
            "unknown_host",
            format!("there is no host {host}; check base_url and the name server"),
        );
        failure.wait = Some(UNKNOWN_HOST_WAIT);
        return failure;
    }
    if has(&["failed to lookup", "dns"]) {
        return CallError::new(
            ErrorClass::Transient,
            "dns",
            format!("the name of {host} could not be looked up: {cause}"),
        );
    }
    CallError::new(ErrorClass::Transient, "connection_failed", format!("cannot connect to {host}: {cause}"))
}

/// Whether it is this machine that has no more sockets or ports: nobody was asked, and no job is to blame.
fn is_own_shortage(cause: Option<&(dyn Error + 'static)>) -> bool {
    // EMFILE and ENFILE, which have the same numbers everywhere.
    let is = |cause: &std::io::Error| {
        cause.kind() == std::io::ErrorKind::AddrNotAvailable || matches!(cause.raw_os_error(), Some(23 | 24))
    };
    causes(cause).any(|cause| cause.downcast_ref().is_some_and(is))
}

/// Whether there was an answer, but none that could be read.
fn answered_something_else(error: &hyper::Error) -> bool {
    causes(Some(error)).any(|cause| cause.downcast_ref().is_some_and(hyper::Error::is_parse))
}

/// A cause and what is behind it.
fn causes<'a>(cause: Option<&'a (dyn Error + 'static)>) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(cause, |cause: &&'a (dyn Error + 'static)| Error::source(*cause))
}

/// The innermost cause, which is the one that says something. It never holds the URL, which the outer ones do.
pub(crate) fn root_cause(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn addresses() {
        for (base, expected) in [
            ("http://x/v1", "http://x/v1/chat/completions"),
            ("http://x/v1/", "http://x/v1/chat/completions"),
            ("http://x", "http://x/chat/completions"),
            (
                "https://x/openai/deployments/d?api-version=1",
                "https://x/openai/deployments/d/chat/completions?api-version=1",
            ),
        ] {
            assert_eq!(chat_url(Url::parse(base).unwrap()).as_str(), expected);
        }
        let named = Url::parse("https://user:password@x:8443/v1?a=b").unwrap();
        assert_eq!(without_user(named).as_str(), "https://x:8443/v1?a=b");
        assert_eq!(usual_field(&Url::parse("https://api.openai.com/v1").unwrap()), MaxTokensField::MaxCompletionTokens);
        assert_eq!(usual_field(&Url::parse("http://localhost/v1").unwrap()), MaxTokensField::MaxTokens);
    }

    #[test]
    fn no_files_left_is_nobodys_fault() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] std::io::Error);
        for (number, expected) in [(24, true), (23, true), (111, false)] {
            let error = Outer(std::io::Error::from_raw_os_error(number));
            assert_eq!(is_own_shortage(Some(&error)), expected, "{error:?}");
        }
        assert!(is_own_shortage(Some(&std::io::Error::from(std::io::ErrorKind::AddrNotAvailable))));
        assert!(!is_own_shortage(None));
    }

    #[test]
    fn keys_in_an_address_are_secrets() {
        for (address, expected) in [
            ("http://user:password@x/v1?api-version=2024-10-21", vec!["password"]),
            ("http://only-a-user@x/v1", vec!["only-a-user"]),
            ("http://x/v1?code=a%2Fb&Subscription-Key=c&alt=sse", vec!["a/b", "c"]),
            ("http://x/v1", vec![]),
        ] {
            let found = secrets_in(&Url::parse(address).unwrap());
            assert_eq!(found.iter().map(Secret::expose).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn a_key_is_found_or_its_absence_explained() {
        let mut config = crate::config::Config::single("http://x/v1", "m", None).unwrap();
        let provider = config.providers.get_mut("default").unwrap();
        provider.api_key_env = Some("KEY".to_owned());
        let find = |provider: &Provider, value: Option<&str>| {
            let mut secrets = Vec::new();
            let environment = |_: &str| value.map(str::to_owned);
            Transport::new(
                "p",
                provider,
                Duration::from_secs(1),
                &tls_config().unwrap(),
                (&environment, Path::new("")),
                &mut secrets,
            )
            .map(|transport| (transport, secrets))
        };
        assert_eq!(
            find(provider, None).unwrap_err().to_string(),
            "providers.p.api_key_env: the environment variable KEY is not set; export KEY=… before the start"
        );
        provider.api_key_env = Some("0a1b2c3d4e5f".to_owned());
        let pasted = find(provider, None).unwrap_err().to_string();
        assert!(pasted.contains("not the key itself") && !pasted.contains("0a1b"), "{pasted}");
        provider.api_key_env = Some("KEY".to_owned());
        assert!(find(provider, Some("a\nb")).unwrap_err().to_string().contains("no header can carry"));
        let (transport, secrets) = find(provider, Some("sk-secret-key\n")).unwrap();
        assert_eq!(secrets, [Secret::new("sk-secret-key")]);
        assert!(!format!("{transport:?}").contains("sk-secret"), "{transport:?}");
        provider.api_key_env = None;
        provider.api_key_file = Some("/nowhere/key".into());
        assert!(
            find(provider, None)
                .unwrap_err()
                .to_string()
                .starts_with("providers.p.api_key_file: cannot read /nowhere/key")
        );
    }
}
