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
    /// A redactor that knows these secrets, also in the forms they take inside JSON, URLs, HTML and base64, and as hex.
    #[must_use]
    pub fn new<'a>(secrets: impl IntoIterator<Item = &'a Secret>) -> Self {
        let mut known = Vec::new();
        for secret in secrets {
            let plain = secret.expose();
            if plain.len() < SECRET_BYTES_MIN {
                continue;
            }
            known.push(plain.to_owned());
            known.extend(disguises(plain));
        }
        // The longest first: a secret that contains another must not leave its tail behind.
        known.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        known.dedup();
        // A form that is short (the inside of a base64) would be found by chance.
        known.retain(|form| form.len() >= SECRET_BYTES_MIN);
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

/// What echoes make of a secret: gateways log headers as base64, quote them into HTML, JSON and URLs, or change their case.
fn disguises(plain: &str) -> Vec<String> {
    let json = serde_json::Value::from(plain).to_string();
    let json = json[1..json.len() - 1].to_owned();
    let hex: String = plain.bytes().map(|byte| format!("{byte:02x}")).collect();
    let escaped: String = plain.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
    let mut forms =
        vec![plain.to_ascii_lowercase(), plain.to_ascii_uppercase(), hex.to_ascii_uppercase(), hex, escaped];
    // PHP escapes the slash, others do not.
    forms.push(json.replace('/', "\\/"));
    forms.push(json);
    for is_kept in [|byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte), |_| false] {
        let upper = escape(plain, is_kept, |byte| format!("%{byte:02X}"));
        forms.push(escape(plain, is_kept, |byte| format!("%{byte:02x}")));
        forms.push(upper);
    }
    let entities = |slash: &str, plus: &str, apostrophe: &str| {
        let text = plain.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;");
        text.replace('/', slash).replace('+', plus).replace('\'', apostrophe)
    };
    forms.push(entities("/", "+", "'"));
    forms.push(entities("/", "+", "&#39;"));
    forms.push(entities("&#x2F;", "&#43;", "&#x27;"));
    forms.extend(base64_insides(plain.as_bytes()));
    // JSON inside of JSON, as gateways put what they were told into messages of their own.
    let twice: Vec<String> = forms.iter().filter(|f| f.contains('\\')).map(|f| f.replace('\\', "\\\\")).collect();
    forms.extend(twice);
    forms
}

fn escape(plain: &str, is_kept: impl Fn(u8) -> bool, escaped: impl Fn(u8) -> String) -> String {
    plain.bytes().map(|byte| if is_kept(byte) { char::from(byte).to_string() } else { escaped(byte) }).collect()
}

/// The part of a base64 that only the secret decides, whatever stands before and after it (`Bearer …`, `user:…`), in both alphabets.
fn base64_insides(secret: &[u8]) -> Vec<String> {
    const DIGITS: [&[u8; 64]; 2] = [
        b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/",
        b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_",
    ];
    let mut forms = Vec::new();
    for skip in 0..3 {
        // Whole groups of three bytes become four digits each; what is left decides its first digit or two, too.
        let rest = secret.get(skip..).unwrap_or_default();
        for digits in DIGITS {
            let digit = |bits: usize| char::from(digits[bits & 63]);
            let mut form = String::new();
            for group in rest.chunks(3) {
                let bits =
                    group.iter().enumerate().fold(0, |bits, (i, byte)| bits | usize::from(*byte) << (16 - 8 * i));
                form.extend(
                    [18, 12, 6, 0]
                        .into_iter()
                        .take(group.len() + usize::from(group.len() == 3))
                        .map(|by| digit(bits >> by)),
                );
            }
            forms.push(form);
        }
    }
    forms
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
    fn disguised_secrets_are_found() {
        let redactor = Redactor::new([&Secret::new("Qz7/aB+cD&eF<gHiJkLmNoPq'sTu")]);
        for echo in [
            "qz7/ab+cd&ef<ghijklmnopq'stu",
            "Qz7%2FaB%2BcD%26eF%3CgHiJkLmNoPq%27sTu",
            "Qz7%2faB%2bcD%26eF%3cgHiJkLmNoPq%27sTu",
            "Qz7\\/aB+cD&eF<gHiJkLmNoPq'sTu",
            "Qz7\\\\/aB+cD&eF<gHiJkLmNoPq'sTu",
            "Qz7/aB+cD&amp;eF&lt;gHiJkLmNoPq'sTu",
            "Qz7/aB+cD&amp;eF&lt;gHiJkLmNoPq&#39;sTu",
            "Qz7&#x2F;aB&#43;cD&amp;eF&lt;gHiJkLmNoPq&#x27;sTu",
            "517a372f61422b63442665463c6748694a6b4c6d4e6f507127735475",
            "517A372F61422B63442665463C6748694A6B4C6D4E6F507127735475",
            // "", "Bearer " and "me:" before it, nothing and a line break after it.
            "UXo3L2FCK2NEJmVGPGdIaUprTG1Ob1BxJ3NUdQ==",
            "QmVhcmVyIFF6Ny9hQitjRCZlRjxnSGlKa0xtTm9QcSdzVHU=",
            "bWU6UXo3L2FCK2NEJmVGPGdIaUprTG1Ob1BxJ3NUdQo=",
            "eDpRejcvYUIrY0QmZUY8Z0hpSmtMbU5vUHEnc1R1",
        ] {
            let clean = redactor.clean_known(&format!("<{echo}>"));
            assert!(clean.contains(REDACTED) && clean.len() < 30, "{echo}: {clean}");
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
            for text in [format!("{before}{secret}{after}"), json] {
                let clean = redactor.clean(&text);
                // A secret may be part of the mark itself ("[redacted]" holds "redacted").
                prop_assert!(REDACTED.contains(&secret) || !redactor.finds(&clean), "{clean}");
            }
        }
    }
}
