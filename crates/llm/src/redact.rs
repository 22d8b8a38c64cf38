//! Redaction: takes keys and key-like text out of everything that is stored, logged or shown.
//!
//! Two nets. The first knows the exact secrets of this process, so that it finds them in any surroundings. The second
//! knows shapes (`Bearer …`, `key=…` in a URL, `sk-…`), so that it also finds other people's keys that a gateway echoes.

use crate::secret::Secret;
use regex::Regex;
use std::sync::LazyLock;

/// What stands where a secret stood.
pub const REDACTED: &str = "[redacted]";

/// Shorter secrets are not searched for one by one: replacing every "a" would destroy a text and protect nothing.
const SECRET_BYTES_MIN: usize = 6;

static SHAPES: LazyLock<[Regex; 3]> = LazyLock::new(|| {
    [
        // An authorization value, quoted or not; base64 and URL-safe characters, and dots of a JWT.
        r"(?i)\b(bearer|basic)(\s+|%20|\+)[A-Za-z0-9._~+/=*-]{4,}",
        // key=… in a query string, api_key: … in a dumped config or header list.
        r#"(?i)\b((?:x-)?(?:api|access|auth|secret|subscription|goog-api)?[-_]?(?:key|token|secret|password))(["']?\s*[=:]\s*["']?)[^\s"'&,;<>{}\[\])]{6,}"#,
        // Well-known key prefixes: OpenAI, Anthropic, OpenRouter (sk-), Groq, xAI, Hugging Face, GitHub, Google.
        r"\b(?:sk-|gsk_|xai-|hf_|ghp_|github_pat_|AIza)[A-Za-z0-9_*-]{6,}",
    ]
    .map(|shape| Regex::new(shape).expect("the shapes are constant and tested"))
});

/// Removes secrets from text. Cheap to clone is not needed: one lives in the engine and is shared.
#[derive(Clone, Default)]
pub struct Redactor {
    secrets: Vec<String>,
}

impl std::fmt::Debug for Redactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Redactor").field("secrets", &self.secrets.len()).finish()
    }
}

impl Redactor {
    /// A redactor that knows these secrets, also in the forms they take inside JSON and URLs.
    #[must_use]
    pub fn new<'a>(secrets: impl IntoIterator<Item = &'a Secret>) -> Self {
        let mut known = Vec::new();
        for secret in secrets {
            let plain = secret.expose();
            if plain.len() < SECRET_BYTES_MIN {
                continue;
            }
            known.push(plain.to_owned());
            let json = serde_json::Value::from(plain).to_string();
            known.push(json[1..json.len() - 1].to_owned());
            known.push(percent_encoded(plain));
        }
        // The longest first: a secret that contains another must not leave its tail behind.
        known.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        known.dedup();
        Self { secrets: known }
    }

    /// The text without the secrets this process knows and without anything shaped like a key.
    #[must_use]
    pub fn clean(&self, text: &str) -> String {
        let mut text = self.clean_known(text);
        let [authorization, named, prefixed] = &*SHAPES;
        text = authorization.replace_all(&text, format!("${{1}}${{2}}{REDACTED}")).into_owned();
        text = named
            .replace_all(&text, |found: &regex::Captures<'_>| {
                // "Authorization: Bearer [redacted]" and "key: [redacted]" are clean already.
                format!("{}{}{REDACTED}", &found[1], &found[2])
            })
            .into_owned();
        prefixed.replace_all(&text, REDACTED).into_owned()
    }

    /// The text without the secrets this process knows, else untouched: for answers, where a shape may be wanted text.
    #[must_use]
    pub fn clean_known(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for secret in &self.secrets {
            if text.contains(secret.as_str()) {
                text = text.replace(secret.as_str(), REDACTED);
            }
        }
        text
    }

    /// Whether the text holds a secret of this process.
    #[must_use]
    pub fn finds(&self, text: &str) -> bool {
        self.secrets.iter().any(|secret| text.contains(secret.as_str()))
    }
}

fn percent_encoded(plain: &str) -> String {
    let mut encoded = String::with_capacity(plain.len());
    for byte in plain.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shapes_are_found() {
        let redactor = Redactor::default();
        for (dirty, clean) in [
            ("Authorization: Bearer abcd1234", "Authorization: Bearer [redacted]"),
            ("https://x/v1?key=AIzaSyA1234567&alt=sse", "https://x/v1?key=[redacted]&alt=sse"),
            (r#"{"api_key":"0123456789ab"}"#, r#"{"api_key":"[redacted]"}"#),
            ("Incorrect API key provided: sk-proj-ab***yz. See", "Incorrect API key provided: [redacted]. See"),
            ("x-api-key: qwertyuiop", "x-api-key: [redacted]"),
            ("5 tokens: too many", "5 tokens: too many"),
            ("the monkey=bananas case", "the monkey=bananas case"),
        ] {
            assert_eq!(redactor.clean(dirty), clean);
        }
    }

    #[test]
    fn a_short_secret_does_not_shred_the_text() {
        assert_eq!(Redactor::new([&Secret::new("a")]).clean("a banana"), "a banana");
    }

    #[test]
    fn a_secret_inside_another_leaves_no_tail() {
        let redactor = Redactor::new([&Secret::new("abcdef"), &Secret::new("abcdefTAIL")]);
        assert_eq!(redactor.clean("<abcdefTAIL>"), "<[redacted]>");
    }

    proptest! {
        #[test]
        fn an_exact_secret_never_survives(before in ".{0,40}", secret in "[!-~]{8,40}", after in ".{0,40}") {
            let redactor = Redactor::new([&Secret::new(&secret)]);
            let json = serde_json::json!({ "echo": format!("{before}{secret}{after}") }).to_string();
            for text in [format!("{before}{secret}{after}"), format!("?k={}", percent_encoded(&secret)), json] {
                let clean = redactor.clean(&text);
                // A secret may be part of the mark itself ("[redacted]" holds "redacted").
                prop_assert!(REDACTED.contains(&secret) || !redactor.finds(&clean), "{clean}");
            }
        }
    }
}
