//! From an address to a stream of bytes: name, TCP, proxy, TLS.

use super::error::NoAnswer;
use hyper::Uri;
use hyper::header::{HeaderMap, HeaderValue, USER_AGENT};
use hyper::http::uri::Scheme;
use hyper::rt::{Read, Write};
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use rustls::ClientConfig;
use std::sync::Arc;
use std::time::Duration;
use tower_service::Service;

/// Unacknowledged bytes for this long mean that the other side is gone (a host that vanished sends no reset).
#[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
const TCP_SILENCE_MAX: Duration = Duration::from_secs(30);
/// How often a connection on which nothing moves is probed, and how many probes may get lost: a call may wait for minutes.
const TCP_PROBE: (Duration, u32) = (Duration::from_secs(15), 3);

/// What requests are written to. Its kind is hidden, as a stream without TLS would else be as large as one with it.
pub(super) trait Stream: Read + Write + Send + Unpin {}

impl<T: Read + Write + Send + Unpin> Stream for T {}

/// The way to one origin.
pub(super) struct Connector {
    way: Way,
    /// For all steps together.
    timeout: Duration,
}

enum Way {
    /// To the provider, or to a proxy that reads the requests and passes them on.
    Straight(HttpsConnector<HttpConnector>, Uri),
    /// Through a proxy that passes on bytes that it cannot read.
    Tunnel(Box<HttpsConnector<Tunnel<HttpsConnector<HttpConnector>>>>, Uri),
}

/// The proxy for an address. `setting` is its URL, or `env` for `HTTPS_PROXY` and its relatives.
pub(crate) fn proxy(setting: Option<&str>, address: &Uri) -> Result<Option<Intercept>, String> {
    let found = match setting {
        None => return Ok(None),
        Some("env") => match Matcher::from_env().intercept(address) {
            None => return Ok(None),
            found => found,
        },
        Some(url) => {
            let url = reqwest::Url::parse(url).ok().filter(reqwest::Url::has_host);
            url.and_then(|url| Matcher::builder().all(String::from(url)).build().intercept(address))
        }
    };
    // One that cannot be used must not mean a connection around it.
    let found = found.filter(|proxy| matches!(proxy.uri().scheme_str(), Some("http" | "https")));
    found.map(Some).ok_or_else(|| match setting {
        Some("env") => "HTTPS_PROXY, HTTP_PROXY or ALL_PROXY names no proxy of the kind http://HOST:PORT".to_owned(),
        _ => "not the URL of a proxy; write \"http://HOST:PORT\" or \"env\"".to_owned(),
    })
}

/// Whether a proxy reads the requests to an address. What is encrypted for the provider it does not.
pub(super) fn is_read_by_proxy(address: &Uri) -> bool {
    address.scheme() != Some(&Scheme::HTTPS)
}

impl Connector {
    pub(super) fn new(
        address: &Uri,
        proxy: Option<&Intercept>,
        tls: &ClientConfig,
        timeout: Duration,
        agent: HeaderValue,
    ) -> Self {
        let tls = Arc::new(tls.clone());
        let straight = HttpsConnector::from((tcp(timeout), tls.clone()));
        let way = match proxy {
            None => Way::Straight(straight, address.clone()),
            Some(proxy) if is_read_by_proxy(address) => Way::Straight(straight, proxy.uri().clone()),
            Some(proxy) => {
                let agent = HeaderMap::from_iter([(USER_AGENT, agent)]);
                let mut tunnel = Tunnel::new(proxy.uri().clone(), straight).with_headers(agent);
                if let Some(password) = proxy.basic_auth() {
                    tunnel = tunnel.with_auth(password.clone());
                }
                Way::Tunnel(Box::new(HttpsConnector::from((tunnel, tls))), address.clone())
            }
        };
        Self { way, timeout }
    }

    pub(super) async fn connect(&self) -> Result<Box<dyn Stream>, NoAnswer> {
        let connecting = async {
            match &self.way {
                Way::Straight(connector, to) => connector.clone().call(to.clone()).await.map(boxed),
                Way::Tunnel(connector, to) => connector.clone().call(to.clone()).await.map(boxed),
            }
        };
        match tokio::time::timeout(self.timeout, connecting).await {
            Ok(connected) => connected.map_err(NoAnswer::Connect),
            Err(_) => Err(NoAnswer::ConnectTimeout),
        }
    }
}

fn tcp(timeout: Duration) -> HttpConnector {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    // Shared by all addresses of a host, so that one that is silent leaves time for the next.
    tcp.set_connect_timeout(Some(timeout));
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    tcp.set_tcp_user_timeout(Some(TCP_SILENCE_MAX));
    tcp.set_keepalive(Some(TCP_PROBE.0));
    tcp.set_keepalive_interval(Some(TCP_PROBE.0));
    tcp.set_keepalive_retries(Some(TCP_PROBE.1));
    tcp
}

fn boxed<T: Read + Write + Send + Unpin + 'static>(stream: MaybeHttpsStream<T>) -> Box<dyn Stream> {
    match stream {
        MaybeHttpsStream::Http(plain) => Box::new(plain),
        MaybeHttpsStream::Https(encrypted) => Box::new(encrypted),
    }
}
