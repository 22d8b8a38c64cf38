//! One request on one connection: an idle one where there is any, else a new one.

use super::connector::{Connector, is_read_by_proxy};
use super::error::NoAnswer;
use super::pool::{Body, Pool, Sender};
use super::response::Response;
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1};
use hyper::header::{ACCEPT, CONTENT_LENGTH, HOST, HeaderMap, HeaderValue, PROXY_AUTHORIZATION, USER_AGENT};
use hyper::http::uri::{Authority, Scheme};
use hyper::{Method, Request, Uri};
use hyper_util::client::proxy::matcher::Intercept;
use rustls::ClientConfig;
use std::sync::Arc;
use std::time::Duration;

/// What requests say they come from.
pub(crate) const AGENT: &str = concat!("posthouse/", env!("CARGO_PKG_VERSION"));

/// Idle connections are closed before most load balancers would: a request into a closing one is a lost attempt.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// The usual 100 are not enough for gateways that pass on the headers of providers beside their own.
const RESPONSE_HEADERS_MAX: usize = 1_000;

/// Sends requests to one address.
pub(crate) struct Client {
    connector: Connector,
    /// The address as it stands in requests: path and query, or all of it where a proxy has to know.
    target: Uri,
    headers: HeaderMap,
    pool: Arc<Pool>,
}

impl Client {
    /// Opens no connection. Where `headers` say nothing of it, they are completed by what every request has.
    pub(crate) fn new(
        address: Uri,
        mut headers: HeaderMap,
        proxy: Option<&Intercept>,
        connect: Duration,
        tls: &ClientConfig,
    ) -> Self {
        let agent = HeaderValue::from_static(AGENT);
        let connector = Connector::new(&address, proxy, tls, connect, agent.clone());
        let host = host(&address);
        let read_by = proxy.filter(|_| is_read_by_proxy(&address));
        let target = if read_by.is_some() { address } else { path(&address) };
        let password = read_by.and_then(Intercept::basic_auth).cloned();
        let usual = [
            (ACCEPT, Some(HeaderValue::from_static("*/*"))),
            (USER_AGENT, Some(agent)),
            (HOST, host),
            (PROXY_AUTHORIZATION, password),
            (CONTENT_LENGTH, Some(HeaderValue::from(0))),
        ];
        for (name, value) in usual {
            if let Some(value) = value {
                headers.entry(name).or_insert(value);
            }
        }
        Self { connector, target, headers, pool: Arc::new(Pool::new(IDLE_MAX)) }
    }

    /// The headers that requests have, to be changed for one. To replace those that are there takes no more room; to add some does.
    pub(crate) fn headers(&self) -> HeaderMap {
        self.headers.clone()
    }

    /// Sends a body; ready when status and headers of the answer are there. Dropping the future drops the connection.
    pub(crate) fn post(
        self: &Arc<Self>,
        mut headers: HeaderMap,
        body: Bytes,
    ) -> impl Future<Output = Result<Response, NoAnswer>> + Send + use<> {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
        let mut request = Box::new(Request::new(Body::new(Full::new(body))));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.target.clone();
        *request.headers_mut() = headers;
        // Boxed, since it passes through several hands, each of which would hold room for it while the call lasts.
        Box::pin(Self::exchange(self.clone(), request))
    }

    async fn exchange(self: Arc<Self>, mut request: Box<Request<Body>>) -> Result<Response, NoAnswer> {
        loop {
            let idle = self.pool.take().await;
            let is_new = idle.is_none();
            let mut sender = match idle {
                Some(sender) => sender,
                // Boxed, as all the steps of it are over when the waiting begins.
                None => Box::pin(self.open()).await?,
            };
            let mut error = match start(&mut sender, request).await {
                Ok(response) => return Ok(Response::new(response, sender, self.pool.clone())),
                Err(error) => error,
            };
            // Given back is only what no byte was written of. An idle connection may have been closed by the other side meanwhile.
            match error.take_message() {
                Some(unsent) if !is_new => request = Box::new(unsent),
                Some(_) => return Err(NoAnswer::Connect(Box::new(error.into_error()))),
                None => return Err(NoAnswer::Exchange(error.into_error())),
            }
        }
    }

    async fn open(&self) -> Result<Sender, NoAnswer> {
        let stream = self.connector.connect().await?;
        let mut builder = http1::Builder::new();
        builder.max_headers(RESPONSE_HEADERS_MAX);
        let (sender, connection) =
            builder.handshake(stream).await.map_err(|error| NoAnswer::Connect(Box::new(error)))?;
        // Ends when the sender is dropped. What goes wrong with it, the request is told.
        tokio::spawn(connection);
        Ok(sender)
    }
}

type Exchanged = Result<hyper::Response<Incoming>, TrySendError<Request<Body>>>;

/// A function, so that the box of the request is gone before the waiting begins.
fn start(sender: &mut Sender, request: Box<Request<Body>>) -> impl Future<Output = Exchanged> + use<> {
    sender.try_send_request(*request)
}

/// The host as requests name it: with the port, where it is not the usual one.
fn host(address: &Uri) -> Option<HeaderValue> {
    let usual = if address.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
    let host = address.host()?;
    let port = address.authority().and_then(Authority::port_u16).filter(|port| *port != usual);
    let text = port.map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
    HeaderValue::try_from(text).ok()
}

/// Path and query of an address.
fn path(address: &Uri) -> Uri {
    address.path_and_query().cloned().map_or_else(Uri::default, Uri::from)
}

#[cfg(test)]
mod tests;
