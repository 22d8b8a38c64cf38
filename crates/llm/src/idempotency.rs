//! The key that tells a provider that it has seen a call before: the same for a call that is made again since nobody knows whether
//! the last one was billed, another one for every other call.
//!
//! What is the same call is told by the queue (see `Context::call_seed`). The endpoint is part of the key, since an attempt may ask several; so is
//! the request, so that a key never stands for another one.

use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderName, USER_AGENT};
use posthouse::Context;
use reqwest::Url;
use sha2::{Digest, Sha256};
use std::fmt::Write as _;

/// What a setting says where no key is to be sent.
pub(crate) const NONE: &str = "none";

/// The usual name of the header.
const USUAL: HeaderName = HeaderName::from_static("idempotency-key");

/// Headers that requests have anyway.
const EVERYWHERE: [HeaderName; 6] = [ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST, USER_AGENT];

/// The header that a provider gets: the one that is set, else the usual one where it is known to do no harm.
pub(crate) fn header(set: Option<&str>, base: &Url) -> Result<Option<HeaderName>, String> {
    match set {
        Some(NONE) => Ok(None),
        Some(name) => match name.parse() {
            Ok(name) if EVERYWHERE.contains(&name) => {
                Err(format!("{name} says something else; write the name of a header for this, or \"{NONE}\""))
            }
            Ok(name) => Ok(Some(name)),
            Err(_) => Err(format!("not a header name; write a name or \"{NONE}\"")),
        },
        None => {
            let host = base.host_str().unwrap_or("");
            let is_harmless = ["api.openai.com", "localhost", "127.0.0.1", "[::1]"].contains(&host);
            Ok(is_harmless.then_some(USUAL))
        }
    }
}

/// The seed of an attempt's keys. Where the database does not tell, the attempt counts as one that nobody has made before.
pub(crate) async fn seed(context: &Context) -> String {
    match context.call_seed().await {
        Ok(seed) => seed,
        Err(error) => {
            tracing::debug!(job = context.job_id(), "no word whether the last call may have been billed: {error}");
            context.own_call_seed()
        }
    }
}

/// The key of a call. `beside`: it goes beside another one to the same endpoint.
pub(crate) fn key(seed: &str, job: i64, (provider, model): (&str, &str), body: &[u8], beside: bool) -> String {
    let mut hash = Sha256::new();
    for part in [seed, &job.to_string(), provider, model, if beside { "beside" } else { "" }] {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    hash.update(body);
    hash.finalize()[..16].iter().fold("posthouse-".to_owned(), |mut key, byte| {
        let _ = write!(key, "{byte:02x}");
        key
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_header_is_sent_where_it_does_no_harm_or_where_it_is_asked_for() {
        let of = |set: Option<&str>, base: &str| header(set, &Url::parse(base).unwrap()).unwrap();
        assert_eq!(of(None, "https://api.openai.com/v1"), Some(USUAL));
        assert_eq!(of(None, "http://127.0.0.1:8080/v1"), Some(USUAL));
        assert_eq!(of(None, "https://gateway.example/v1"), None);
        assert_eq!(of(Some("none"), "https://api.openai.com/v1"), None);
        assert_eq!(of(Some("X-Request-Key"), "https://gateway.example/v1").unwrap(), "x-request-key");
        for no_header_of_its_own in ["two words", "Host", "user-agent", "Authorization"] {
            let error = header(Some(no_header_of_its_own), &Url::parse("http://x").unwrap()).unwrap_err();
            assert!(error.contains("none"), "{error}");
        }
    }
}
