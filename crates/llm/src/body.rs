//! A JSON object whose values are kept byte for byte: what cannot be understood cannot be changed.
//!
//! A payload goes through here on its way to the provider, so that integers beyond 2^53, numbers beyond f64 and deep nesting
//! arrive as they were sent. Nothing in here recurses.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The fields of an object, in order, each value as its own text.
#[derive(Debug, Clone, Default)]
pub(crate) struct Body(Vec<(String, Box<RawValue>)>);

impl Body {
    /// Reads an object. The error is a sentence about the text.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text.trim_start().chars().next() {
            Some('{') => serde_json::from_str(text).map_err(|error| format!("not valid JSON: {error}")),
            Some('[') => Err("an array, not an object".to_owned()),
            Some('"') => Err("a string, not an object".to_owned()),
            None => Err("empty, not an object".to_owned()),
            Some(_) => Err("not an object".to_owned()),
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(field, _)| field == name).map(|(_, value)| value.get())
    }

    pub(crate) fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.get()))
    }

    /// Sets a field, in its old place if it had one.
    pub(crate) fn set(&mut self, name: &str, value: impl serde::Serialize) {
        let raw = serde_json::value::to_raw_value(&value).expect("plain values become JSON");
        match self.0.iter_mut().find(|(field, _)| field == name) {
            Some((_, old)) => *old = raw,
            None => self.0.push((name.to_owned(), raw)),
        }
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.0.retain(|(field, _)| field != name);
    }

    /// The object as text.
    pub(crate) fn text(&self) -> String {
        // Exact but for names with escapes: the text is held for as long as a call lasts.
        let bytes = self.0.iter().map(|(name, value)| name.len() + value.get().len() + "\"\":,".len()).sum::<usize>();
        let mut text = String::with_capacity(bytes + "{}".len());
        text.push('{');
        for (index, (name, value)) in self.0.iter().enumerate() {
            if index > 0 {
                text.push(',');
            }
            text.push_str(&serde_json::Value::from(name.as_str()).to_string());
            text.push(':');
            text.push_str(value.get());
        }
        text.push('}');
        text
    }
}

impl serde::Serialize for Body {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Body;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body, A::Error> {
                let mut body = Body::default();
                while let Some((name, value)) = map.next_entry::<String, Box<RawValue>>()? {
                    // Which of two wins differs from server to server, so neither does.
                    if body.get(&name).is_some() {
                        return Err(A::Error::custom(format!("field {name:?} appears twice")));
                    }
                    body.0.push((name, value));
                }
                Ok(body)
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn values_pass_byte_for_byte() {
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        let text = format!(r#"{{"b":9007199254740993,"a":1e400,"zero":-0,"dup":{{"x":1,"x":2}},"deep":{deep}}}"#);
        let mut body = Body::parse(&text).unwrap();
        assert_eq!(body.text(), text);
        body.set("a", 1);
        body.remove("deep");
        body.set("c", "\"");
        assert_eq!(body.text(), r#"{"b":9007199254740993,"a":1,"zero":-0,"dup":{"x":1,"x":2},"c":"\""}"#);
        assert_eq!(serde_json::to_string(&body).unwrap(), body.text());
    }

    #[test]
    fn what_is_no_object_is_named() {
        for (text, expected) in [
            ("\"x\"", "a string, not an object"),
            ("[1]", "an array, not an object"),
            ("  ", "empty, not an object"),
            ("7", "not an object"),
            (r#"{"a":1,"a":2}"#, "not valid JSON: field \"a\" appears twice at line 1 column 13"),
            ("{\"a\":\"\\ud800\"", "not valid JSON"),
        ] {
            let error = Body::parse(text).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
