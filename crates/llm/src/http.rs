//! An HTTP client for what is no model, as careful as those for providers: no redirects, no retries of its own, our certificates.

use crate::config::ConfigError;
use crate::transport::{root_cause, tls_config};
use crate::wire::AGENT;
use reqwest::Client;
use std::time::Duration;

/// A client that gives up a request after `timeout`. The proxy is a URL, or `env` for `HTTPS_PROXY` and its relatives.
///
/// # Errors
/// When the proxy is no URL, or the client cannot be made.
pub fn http_client(timeout: Duration, proxy: Option<&str>) -> Result<Client, ConfigError> {
    let builder = Client::builder()
        .user_agent(AGENT)
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .timeout(timeout)
        .tls_backend_preconfigured(tls_config()?);
    let builder =
        match proxy {
            None => builder.no_proxy(),
            Some("env") => builder,
            Some(url) => builder.no_proxy().proxy(reqwest::Proxy::all(url).map_err(|_| {
                ConfigError::new("proxy", "not the URL of a proxy; write \"http://HOST:PORT\" or \"env\"")
            })?),
        };
    let failed = |error: reqwest::Error| ConfigError::new("http", format!("no client: {}", root_cause(&error)));
    builder.build().map_err(failed)
}
