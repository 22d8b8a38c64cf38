//! As much HTTP as three pages without arguments need: one request a connection, a bounded head, a time limit.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::book::Book;
use super::health::readiness;

/// A request is not waited for longer, nor an answer written for longer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The most bytes of a request's head.
const HEAD_MAX: usize = 8 << 10;
/// Connections at a time; more wait.
const CONNECTIONS_MAX: usize = 64;
/// After an accept that failed, for want of open files say.
const REST: Duration = Duration::from_millis(100);

/// Answers for as long as the process runs.
pub(super) async fn serve(listener: TcpListener, book: Arc<Book>) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = room.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((connection, _)) => {
                let book = book.clone();
                tokio::spawn(async move {
                    let _ = tokio::time::timeout(PATIENCE, answer(connection, &book)).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::debug!(%error, "metrics: no connection accepted");
                tokio::time::sleep(REST).await;
            }
        }
    }
}

/// What is sent back.
struct Page {
    status: &'static str,
    kind: &'static str,
    body: String,
}

const TEXT: &str = "text/plain; charset=utf-8";
const EXPOSITION: &str = "text/plain; version=0.0.4; charset=utf-8";
const JSON: &str = "application/json";

impl Page {
    fn text(status: &'static str, body: &str) -> Self {
        Self { status, kind: TEXT, body: format!("{body}\n") }
    }
}

async fn answer(mut connection: TcpStream, book: &Book) -> std::io::Result<()> {
    let head = head(&mut connection).await?;
    let (method, target) = request(&head);
    let page = page(method, target, book);
    let length = page.body.len();
    let head = format!(
        "HTTP/1.1 {}\r\ncontent-type: {}\r\ncontent-length: {length}\r\ncache-control: no-store\r\nconnection: close\r\n\r\n",
        page.status, page.kind
    );
    connection.write_all(head.as_bytes()).await?;
    if method != "HEAD" {
        connection.write_all(page.body.as_bytes()).await?;
    }
    connection.shutdown().await
}

/// The head of a request, up to the empty line or as much as is read of one.
async fn head(connection: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let (mut head, mut bytes) = (Vec::new(), [0; 1024]);
    while !head.windows(4).any(|end| end == b"\r\n\r\n") && head.len() < HEAD_MAX {
        match connection.read(&mut bytes).await? {
            0 => break,
            read => head.extend_from_slice(&bytes[..read]),
        }
    }
    Ok(head)
}

/// Method and path; both empty for what is no request.
fn request(head: &[u8]) -> (&str, &str) {
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = std::str::from_utf8(line).unwrap_or_default().split(' ');
    match (words.next(), words.next(), words.next()) {
        (Some(method), Some(target), Some(version)) if version.starts_with("HTTP/1.") => {
            (method, target.split('?').next().unwrap_or_default())
        }
        _ => ("", ""),
    }
}

fn page(method: &str, path: &str, book: &Book) -> Page {
    match (method, path) {
        ("", _) => Page::text("400 Bad Request", "this is no HTTP request of version 1.0 or 1.1"),
        ("GET" | "HEAD", "/metrics") => Page { status: "200 OK", kind: EXPOSITION, body: book.metrics.to_string() },
        ("GET" | "HEAD", "/healthz") => Page { status: "200 OK", kind: JSON, body: "{\"alive\":true}\n".to_owned() },
        ("GET" | "HEAD", "/readyz") => {
            let (is_ready, report) = readiness(book);
            let status = if is_ready { "200 OK" } else { "503 Service Unavailable" };
            Page { status, kind: JSON, body: format!("{report}\n") }
        }
        ("GET" | "HEAD", _) => Page::text("404 Not Found", "there are /metrics, /healthz and /readyz"),
        _ => Page::text("405 Method Not Allowed", "only GET and HEAD are answered"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_are_taken_for_such() {
        assert_eq!(request(b"GET /metrics?x=1 HTTP/1.1\r\nhost: a\r\n\r\n"), ("GET", "/metrics"));
        for nonsense in [&b""[..], b"GET", b"GET /metrics\r\n\r\n", b"GET / HTTP/2\r\n\r\n", b"\xff\xfe / HTTP/1.1\r\n"]
        {
            assert_eq!(request(nonsense), ("", ""));
        }
    }
}
