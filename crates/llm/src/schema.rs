//! The check of an answer against a kind's JSON schema.

use crate::text::with_whole_characters;
use serde_json::Value;
use serde_json::value::RawValue;

/// A compiled schema, with its own text, which is what the provider is sent.
#[derive(Debug)]
pub(crate) struct AnswerSchema {
    validator: jsonschema::Validator,
    pub(crate) text: Box<RawValue>,
}

impl AnswerSchema {
    /// Compiles a schema. References outside of it are refused: checking an answer must not touch the network or the disk.
    pub(crate) fn new(text: &str) -> Result<Self, String> {
        let text = RawValue::from_string(text.to_owned()).map_err(|error| format!("not valid JSON: {error}"))?;
        let schema: Value = serde_json::from_str(text.get()).map_err(|error| format!("not valid JSON: {error}"))?;
        let validator = jsonschema::validator_for(&schema).map_err(|error| format!("not a JSON schema: {error}"))?;
        Ok(Self { validator, text })
    }

    /// The JSON in an answer that fits the schema, byte for byte; or what is wrong with it.
    pub(crate) fn check(&self, answer: &str) -> Result<Box<RawValue>, String> {
        let text = with_whole_characters(without_fence(answer));
        let value: Value = serde_json::from_str(&text).map_err(|error| format!("the answer is not JSON: {error}"))?;
        let mistakes: Vec<String> = self
            .validator
            .iter_errors(&value)
            .take(3)
            .map(|mistake| {
                let place = mistake.instance_path().to_string();
                format!("{}: {}", if place.is_empty() { "/" } else { &place }, mistake.masked())
            })
            .collect();
        if mistakes.is_empty() {
            RawValue::from_string(text.into_owned()).map_err(|error| error.to_string())
        } else {
            Err(format!("the answer does not match the schema: {}", mistakes.join("; ")))
        }
    }
}

/// Models wrap JSON into a Markdown fence however often they are told not to.
fn without_fence(answer: &str) -> &str {
    let text = answer.trim();
    let Some(inside) = text.strip_prefix("```").and_then(|rest| rest.strip_suffix("```")) else { return text };
    match inside.split_once('\n') {
        Some((language, body)) if !language.contains('{') => body.trim(),
        _ => inside.trim(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn fitting_and_not_fitting() {
        let schema =
            AnswerSchema::new(r#"{"type":"object","required":["n"],"properties":{"n":{"type":"integer"}}}"#).unwrap();
        assert_eq!(schema.check("```json\n{\"n\": 9007199254740993}\n```").unwrap().get(), "{\"n\": 9007199254740993}");
        assert_eq!(schema.check("```{\"n\":1}```").unwrap().get(), "{\"n\":1}");
        let halved = r#"{"n":9007199254740993,"s":"a\ud800b"}"#;
        assert_eq!(schema.check(halved).unwrap().get(), r#"{"n":9007199254740993,"s":"a\ufffdb"}"#);
        assert!(schema.check("sorry").unwrap_err().starts_with("the answer is not JSON"));
        assert!(schema.check("{\"n\":\"x\"}").unwrap_err().starts_with("the answer does not match the schema: /n: "));
        assert!(schema.check(&"[".repeat(100_000)).unwrap_err().contains("recursion limit"));
    }

    #[test]
    fn a_schema_reaches_nowhere() {
        assert!(AnswerSchema::new("{").is_err());
        assert!(AnswerSchema::new(r#"{"type":"nonsense"}"#).is_err());
        for reference in ["https://example.com/s.json", "file:///etc/passwd"] {
            assert!(AnswerSchema::new(&format!(r#"{{"$ref":"{reference}"}}"#)).is_err(), "{reference}");
        }
    }
}
