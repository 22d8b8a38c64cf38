//! A connection that can be torn, and a body that plays frames on it.

use super::reply::Frame;
use bytes::Bytes;
use hyper::body::{Body, Frame as BodyFrame};
use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

/// A TCP stream that ends with a reset, instead of an orderly end, once the flag is up.
pub(crate) struct Tearable {
    stream: TcpStream,
    reset: Arc<AtomicBool>,
}

impl Tearable {
    pub(crate) fn new(stream: TcpStream, reset: Arc<AtomicBool>) -> Self {
        Self { stream, reset }
    }
}

impl Drop for Tearable {
    fn drop(&mut self) {
        if self.reset.load(Ordering::Acquire) {
            // Closing with a linger of zero sends RST. If the option cannot be set, the client sees an end, which tears as well.
            let _ = socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
        }
    }
}

impl AsyncRead for Tearable {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Tearable {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Before a connection is torn, what was said so far gets this long to arrive.
const TEAR_PAUSE: Duration = Duration::from_millis(20);

/// A body that plays frames. Told what happened to it through `on_end`.
pub(crate) struct Player {
    frames: VecDeque<Frame>,
    sleep: Option<Pin<Box<Sleep>>>,
    tearing: bool,
    reset: Arc<AtomicBool>,
    on_end: Option<Box<dyn FnOnce(bool) + Send + Sync>>,
}

impl Player {
    /// `on_end` is called once: with true when all frames were taken, with false when the client went away first or a fault tore it.
    pub(crate) fn new(frames: Vec<Frame>, reset: Arc<AtomicBool>, on_end: Box<dyn FnOnce(bool) + Send + Sync>) -> Self {
        Self { frames: frames.into(), sleep: None, tearing: false, reset, on_end: Some(on_end) }
    }

    fn end(&mut self, finished: bool) {
        if let Some(on_end) = self.on_end.take() {
            on_end(finished);
        }
    }
}

impl Body for Player {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<BodyFrame<Bytes>>>> {
        loop {
            if let Some(sleep) = &mut self.sleep {
                ready!(sleep.as_mut().poll(cx));
                self.sleep = None;
            }
            match self.frames.pop_front() {
                None => {
                    self.end(true);
                    return Poll::Ready(None);
                }
                Some(Frame::Data(bytes)) if bytes.is_empty() => {}
                Some(Frame::Data(bytes)) => return Poll::Ready(Some(Ok(BodyFrame::data(bytes)))),
                Some(Frame::Wait(time)) => self.sleep = (!time.is_zero()).then(|| Box::pin(tokio::time::sleep(time))),
                Some(Frame::Forever(bytes, pause)) => {
                    self.frames.push_front(Frame::Forever(bytes.clone(), pause));
                    self.frames.push_front(Frame::Wait(pause));
                    return Poll::Ready(Some(Ok(BodyFrame::data(bytes))));
                }
                Some(Frame::Hang) => {
                    // Nothing will wake this; the connection notices by itself when the client goes away.
                    self.frames.push_front(Frame::Hang);
                    return Poll::Pending;
                }
                Some(tear @ (Frame::Break | Frame::Reset)) if !self.tearing => {
                    self.tearing = true;
                    self.frames.push_front(tear);
                    self.frames.push_front(Frame::Wait(TEAR_PAUSE));
                }
                Some(tear @ (Frame::Break | Frame::Reset)) => {
                    if tear == Frame::Reset {
                        self.reset.store(true, Ordering::Release);
                    }
                    self.end(false);
                    return Poll::Ready(Some(Err(io::Error::other("torn by the script"))));
                }
            }
        }
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        // A client that has all it wants may close before the end of the body is asked for.
        let finished = self.frames.is_empty() && self.sleep.is_none();
        self.end(finished);
    }
}
