//! An answer while it is read. Its connection is used again when it was read to its end, and closed when it is dropped before.

use super::pool::{Pool, Sender};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::StatusCode;
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use std::sync::Arc;

pub(crate) struct Response {
    inner: hyper::Response<Incoming>,
    /// `None`: given back.
    sender: Option<Sender>,
    pool: Arc<Pool>,
}

impl Response {
    pub(super) fn new(inner: hyper::Response<Incoming>, sender: Sender, pool: Arc<Pool>) -> Self {
        Self { inner, sender: Some(sender), pool }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.inner.status()
    }

    pub(crate) fn headers(&self) -> &HeaderMap {
        self.inner.headers()
    }

    pub(crate) fn headers_mut(&mut self) -> &mut HeaderMap {
        self.inner.headers_mut()
    }

    /// The next piece of the body. `None`: that was all.
    pub(crate) async fn chunk(&mut self) -> hyper::Result<Option<Bytes>> {
        while let Some(frame) = self.inner.body_mut().frame().await {
            match frame.map(hyper::body::Frame::into_data) {
                Ok(Ok(data)) => return Ok(Some(data)),
                // Headers after the body, which mean nothing here.
                Ok(Err(_)) => {}
                Err(error) => {
                    self.sender = None;
                    return Err(error);
                }
            }
        }
        if let Some(sender) = self.sender.take() {
            self.pool.put(sender);
        }
        Ok(None)
    }
}
