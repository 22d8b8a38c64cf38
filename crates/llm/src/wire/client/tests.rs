//! Real sockets: what is sent, and on how many connections.
#![allow(clippy::unwrap_used)]

use super::super::connector::proxy;
use super::*;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{Instant, timeout};

const REPLY: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
const CERTIFICATE: &[u8] = include_bytes!("../../../tests/it/certificate.pem");
const KEY: &[u8] = include_bytes!("../../../tests/it/key.pem");

async fn within<T>(work: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), work).await.expect("it took more than 20 seconds")
}

/// One step of a future; whether that was not the last.
async fn waits(future: &mut (impl Future + Unpin)) -> bool {
    poll_fn(|context| Poll::Ready(Pin::new(&mut *future).poll(context).is_pending())).await
}

/// Up to an empty line. `None`: the connection ended before anything came.
async fn head<S: AsyncRead + Unpin>(stream: &mut BufReader<S>) -> Option<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.unwrap_or_default() == 0 {
            assert!(head.is_empty(), "cut in the middle: {head:?}");
            return None;
        }
    }
    Some(head)
}

#[derive(Clone, Copy)]
enum Act {
    Answer,
    AnswerAndClose,
    Close,
}

/// Answers the requests of a connection; `act` is told the how manieth it is. The heads of them all.
async fn serve<S: AsyncRead + AsyncWrite + Unpin>(stream: S, act: fn(usize) -> Act) -> Vec<String> {
    let mut stream = BufReader::new(stream);
    let mut heads = Vec::new();
    while let Some(head) = head(&mut stream).await {
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap().parse().unwrap();
        stream.read_exact(&mut vec![0; length]).await.unwrap();
        heads.push(head);
        let act = act(heads.len());
        if !matches!(act, Act::Close) {
            stream.write_all(REPLY.as_bytes()).await.unwrap();
            stream.flush().await.unwrap();
        }
        if !matches!(act, Act::Answer) {
            break;
        }
    }
    heads
}

/// A provider. It tells of each connection, when that is closed, what was asked on it.
struct Provider {
    base: String,
    closed: UnboundedReceiver<Vec<String>>,
}

impl Provider {
    async fn new(act: fn(usize) -> Act) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let (closing, closed) = unbounded_channel();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let closing = closing.clone();
                tokio::spawn(async move { closing.send(serve(stream, act).await) });
            }
        });
        Self { base, closed }
    }

    fn client(&self) -> Arc<Client> {
        client(&format!("{}/v1/chat?a=b", self.base), None)
    }

    /// How many requests came on the next connection that is closed.
    async fn requests(&mut self) -> usize {
        within(self.closed.recv()).await.unwrap().len()
    }
}

fn client(address: &str, through: Option<&str>) -> Arc<Client> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(CERTIFICATE).unwrap()).unwrap();
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(ring).with_safe_default_protocol_versions().unwrap();
    let tls = versions.with_root_certificates(roots).with_no_client_auth();
    let address: Uri = address.parse().unwrap();
    let headers = HeaderMap::from_iter([
        (CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (AUTHORIZATION, HeaderValue::from_static("Bearer key")),
    ]);
    let proxy = proxy(through, &address).unwrap();
    Arc::new(Client::new(address, headers, proxy.as_ref(), Duration::from_secs(10), &tls))
}

async fn post(client: &Arc<Client>) -> Result<Response, NoAnswer> {
    within(client.post(client.headers(), Bytes::from_static(b"{}"))).await
}

/// Asks, and reads the answer to its end.
async fn ask(client: &Arc<Client>) {
    let mut response = post(client).await.unwrap();
    let mut body = Vec::new();
    while let Some(chunk) = within(response.chunk()).await.unwrap() {
        body.extend_from_slice(&chunk);
    }
    assert_eq!((response.status().as_u16(), body.as_slice()), (200, b"hello".as_slice()));
}

fn sorted(head: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = head.trim_end().lines().collect();
    lines[1..].sort_unstable();
    lines
}

#[tokio::test]
async fn an_idle_connection_is_used_again_and_every_request_says_the_same() {
    let mut provider = Provider::new(|_| Act::Answer).await;
    let client = provider.client();
    for _ in 0..3 {
        ask(&client).await;
    }
    drop(client);
    let heads = within(provider.closed.recv()).await.unwrap();
    assert_eq!(heads.len(), 3, "all on one connection");
    let host = provider.base.replace("http://", "host: ");
    for head in heads {
        let expected = [
            "POST /v1/chat?a=b HTTP/1.1",
            "accept: */*",
            "authorization: Bearer key",
            "content-length: 2",
            "content-type: application/json",
            &host,
            &format!("user-agent: {AGENT}"),
        ];
        assert_eq!(sorted(&head), expected);
    }
}

#[tokio::test]
async fn an_idle_connection_that_was_closed_is_replaced() {
    let mut provider = Provider::new(|_| Act::AnswerAndClose).await;
    let client = provider.client();
    for _ in 0..2 {
        ask(&client).await;
        assert_eq!(provider.requests().await, 1);
        // The other side knows of its end a little earlier.
        let deadline = Instant::now() + Duration::from_secs(10);
        while let Some(sender) = client.pool.take().await {
            assert!(Instant::now() < deadline, "a closed connection is used");
            client.pool.put(sender);
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn what_was_not_begun_is_sent_on_another_connection() {
    let mut provider = Provider::new(|_| Act::Answer).await;
    let client = provider.client();
    let (here, there) = tokio::io::duplex(1024);
    let (sender, mut idle) = http1::handshake(TokioIo::new(here)).await.unwrap();
    assert!(waits(&mut idle).await);
    client.pool.put(sender);
    let mut call = pin!(client.post(client.headers(), Bytes::new()));
    assert!(waits(&mut call).await, "it waits for the idle connection");
    assert!(client.pool.take().await.is_none(), "which is nobody else's any more");
    drop((idle, there));
    assert_eq!(within(call).await.unwrap().status().as_u16(), 200);
    assert_eq!(provider.requests().await, 1);
}

#[tokio::test]
async fn what_was_sent_is_never_sent_again() {
    let mut provider = Provider::new(|number| if number == 1 { Act::Answer } else { Act::Close }).await;
    let client = provider.client();
    ask(&client).await;
    let error = post(&client).await.err().unwrap();
    assert!(matches!(error, NoAnswer::Exchange(_)), "{error:?}");
    assert_eq!(provider.requests().await, 2);
    ask(&client).await;
    drop(client);
    assert_eq!(provider.requests().await, 1, "nothing but the next call came after it");
}

#[tokio::test]
async fn nobody_gets_the_connection_of_an_answer_that_was_not_read() {
    let mut provider = Provider::new(|_| Act::Answer).await;
    let client = provider.client();
    let mut response = post(&client).await.unwrap();
    assert!(within(response.chunk()).await.unwrap().is_some());
    drop(response);
    assert_eq!(provider.requests().await, 1);
    assert!(client.pool.take().await.is_none());
}

#[tokio::test]
async fn a_connection_that_nobody_needs_is_closed_in_time() {
    let mut provider = Provider::new(|_| Act::Answer).await;
    let mut client = provider.client();
    Arc::get_mut(&mut client).unwrap().pool = Arc::new(Pool::new(Duration::from_millis(50)));
    for _ in 0..2 {
        ask(&client).await;
        assert_eq!(provider.requests().await, 1);
    }
}

#[tokio::test]
async fn a_proxy_reads_what_is_not_encrypted() {
    let mut provider = Provider::new(|_| Act::Answer).await;
    let through = provider.base.replace("http://", "http://user:p%40ss@");
    let client = client("http://example.invalid:80/v1/chat?a=b", Some(&through));
    ask(&client).await;
    drop(client);
    let heads = within(provider.closed.recv()).await.unwrap();
    let expected = [
        "POST http://example.invalid:80/v1/chat?a=b HTTP/1.1",
        "accept: */*",
        "authorization: Bearer key",
        "content-length: 2",
        "content-type: application/json",
        "host: example.invalid",
        "proxy-authorization: Basic dXNlcjpwQHNz",
        &format!("user-agent: {AGENT}"),
    ];
    assert_eq!(sorted(&heads[0]), expected);
}

#[tokio::test]
async fn a_proxy_does_not_read_what_is_encrypted() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let through = format!("http://user:p%40ss@{}", listener.local_addr().unwrap());
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let versions = rustls::ServerConfig::builder_with_provider(ring).with_safe_default_protocol_versions().unwrap();
    let certificate = CertificateDer::from_pem_slice(CERTIFICATE).unwrap();
    let key = PrivateKeyDer::from_pem_slice(KEY).unwrap();
    let mut tls = versions.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap();
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let server = tokio::spawn(async move {
        let mut stream = BufReader::new(listener.accept().await.unwrap().0);
        let connect = head(&mut stream).await.unwrap();
        stream.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await.unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
        let stream = acceptor.accept(stream).await.unwrap();
        let protocol = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
        (connect, protocol, serve(stream, |_| Act::Answer).await)
    });
    let client = client("https://localhost/v1/chat", Some(&through));
    for _ in 0..2 {
        ask(&client).await;
    }
    drop(client);
    let (connect, protocol, heads) = within(server).await.unwrap();
    let agent = format!("user-agent: {AGENT}");
    let lines = ["CONNECT localhost:443 HTTP/1.1", "Host: localhost:443"];
    assert_eq!(sorted(&connect), [&lines[..], &["proxy-authorization: Basic dXNlcjpwQHNz", &agent]].concat());
    assert_eq!((protocol, heads.len()), (None, 2), "HTTP/2 is not on offer");
    for head in heads {
        assert!(head.starts_with("POST /v1/chat HTTP/1.1\r\n") && head.contains("host: localhost\r\n"), "{head}");
        assert!(!head.contains("proxy-authorization"), "{head}");
    }
}

#[test]
fn a_proxy_that_cannot_be_used_is_refused() {
    let address = Uri::from_static("https://example.invalid/v1");
    for setting in ["", "http://", "socks5h:no-host", "socks5://proxy.invalid:1080", "ftp://proxy.invalid"] {
        assert!(proxy(Some(setting), &address).unwrap_err().starts_with("not the URL of a proxy"), "{setting}");
    }
    assert!(proxy(None, &address).unwrap().is_none());
    let found = proxy(Some("http://user:secret@proxy.invalid:3128"), &address).unwrap().unwrap();
    assert_eq!(found.uri(), "http://proxy.invalid:3128/");
}

/// Thousands of calls wait at the same time.
#[test]
fn a_call_that_waits_is_small() {
    let client = client("http://127.0.0.1:1/v1", None);
    let call = client.exchange(Box::new(Request::new(Body::default())));
    assert!(size_of_val(&call) < 500, "{}", size_of_val(&call));
}
