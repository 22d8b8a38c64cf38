//! Texts from strangers: cut to a bound, freed of what cannot be stored.

use crate::redact::Redactor;
use serde_json::Value;
use std::borrow::Cow;

/// The most that is kept of an error or of a partial answer.
pub const SNIPPET_BYTES_MAX: usize = 2 << 10;

/// The most that is kept of a provider's word for something.
const LABEL_BYTES_MAX: usize = 200;

/// The beginning of a text, cut at a character.
pub(crate) fn capped(text: &str, bytes_max: usize) -> &str {
    let end = (0..=bytes_max.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// The text with what no database takes, or no terminal survives, replaced by U+FFFD.
pub(crate) fn storable(text: &str) -> String {
    text.replace(|c: char| c.is_control() && !matches!(c, '\n' | '\t' | '\r'), "\u{FFFD}")
}

/// A provider's word for something (an id, a model, a reason) as it is stored: short, storable, and without secrets.
pub(crate) fn label(text: &str, redactor: &Redactor) -> String {
    // Enough is cleaned that a secret which the cut would halve is whole before.
    capped(&storable(&redactor.clean(capped(text, LABEL_BYTES_MAX * 64))), LABEL_BYTES_MAX).to_owned()
}

/// Cleans every string of a value, keys included, and says whether anything changed.
pub(crate) fn clean_strings(value: &mut Value, clean: &impl Fn(&str) -> String) -> bool {
    match value {
        Value::String(text) => {
            let cleaned = clean(text);
            let changed = cleaned != *text;
            *text = cleaned;
            changed
        }
        Value::Array(items) => items.iter_mut().fold(false, |changed, item| clean_strings(item, clean) | changed),
        Value::Object(map) => {
            let mut changed = false;
            for (name, mut item) in std::mem::take(map) {
                let name_cleaned = clean(&name);
                changed |= clean_strings(&mut item, clean) | (name_cleaned != name);
                map.insert(name_cleaned, item);
            }
            changed
        }
        _ => false,
    }
}

/// Parses JSON that may hold escapes of lone surrogates (`\ud800`), which are replaced by `\ufffd`. The flag says whether there were any.
pub(crate) fn parse_lenient(text: &str) -> Result<(Value, bool), serde_json::Error> {
    match serde_json::from_str(text) {
        Ok(value) => Ok((value, false)),
        Err(error) => {
            let repaired = replace_lone_surrogates(text);
            if repaired == text { Err(error) } else { Ok((serde_json::from_str(&repaired)?, true)) }
        }
    }
}

/// JSON text whose halved characters (`\ud800` alone) are replaced by `\ufffd`; else as it is, byte for byte.
pub(crate) fn with_whole_characters(text: &str) -> Cow<'_, str> {
    if text.contains("\\u") { Cow::Owned(replace_lone_surrogates(text)) } else { Cow::Borrowed(text) }
}

fn replace_lone_surrogates(text: &str) -> String {
    let unit = |at: usize| {
        let digits = text.get(at..at + 6)?.strip_prefix("\\u")?;
        u16::from_str_radix(digits, 16).ok()
    };
    let mut repaired = String::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        let rest = &text[at..];
        let Some(backslash) = rest.find('\\') else {
            repaired.push_str(rest);
            break;
        };
        repaired.push_str(&rest[..backslash]);
        at += backslash;
        let length = match (unit(at), unit(at + 6)) {
            (Some(0xD800..=0xDBFF), Some(0xDC00..=0xDFFF)) => 12,
            (Some(0xD800..=0xDFFF), _) => {
                repaired.push_str("\\ufffd");
                at += 6;
                continue;
            }
            (Some(_), _) => 6,
            // Any other escape is a backslash and one character, which may be wider than a byte in broken JSON.
            (None, _) => 1 + text[at + 1..].chars().next().map_or(0, char::len_utf8),
        };
        repaired.push_str(&text[at..at + length]);
        at += length;
    }
    repaired
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    #[test]
    fn a_cut_never_splits_a_character() {
        assert_eq!((capped("a€b", 2), capped("a€b", 4), capped("", 9)), ("a", "a€", ""));
        assert_eq!(storable("a\0b\u{1b}[31m\n"), "a\u{FFFD}b\u{FFFD}[31m\n");
    }

    #[test]
    fn lone_surrogates_are_replaced_and_pairs_kept() {
        let (value, changed) =
            parse_lenient(r#"{"a":"x\ud800y","b":"\ud83d\ude00","c":"\\ud800","d":"\udc00"}"#).unwrap();
        assert!(changed);
        assert_eq!(value, json!({ "a": "x\u{FFFD}y", "b": "😀", "c": "\\ud800", "d": "\u{FFFD}" }));
        assert!(parse_lenient(r#"{"a":"\é"#).is_err());
        assert!(parse_lenient("\\").is_err());
    }
}
