//! Templates over a payload's fields: `{{ text }}`.
//!
//! The language is Jinja, in strict mode: a field that is not there is an error, never an empty hole in a prompt. There is
//! no loader (nothing can be included), no escaping (a prompt is no HTML), and a payload is data, never a template.

use crate::body::Body;
use minijinja::value::{Serde, Value, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, Output, State, UndefinedBehavior};
use std::collections::{BTreeMap, BTreeSet};

/// One compiled template.
#[derive(Debug)]
pub(crate) struct Template {
    environment: Environment<'static>,
    fields: BTreeSet<String>,
}

/// The only template of its environment.
const NAME: &str = "template";

/// Why a template gave no text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RenderError {
    /// It uses something that is not there.
    Undefined(String),
    /// Anything else.
    Other(String),
}

impl Template {
    /// Compiles a template. The error is a sentence about the source.
    pub(crate) fn new(source: &str) -> Result<Self, String> {
        let mut environment = Environment::new();
        // Lenient until its words are known, strict ever after.
        environment.set_undefined_behavior(UndefinedBehavior::Chainable);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_formatter(write_value);
        environment.add_template_owned(NAME, source.to_owned()).map_err(|error| format!("not a template: {error}"))?;
        let globals: BTreeSet<String> = environment.globals().map(|(name, _)| name.to_owned()).collect();
        let template = environment.get_template(NAME).map_err(|error| error.to_string())?;
        let fields = template.undeclared_variables(false).into_iter().filter(|name| !globals.contains(name)).collect();
        known_words(&template)?;
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        Ok(Self { environment, fields })
    }

    /// The payload fields it looks at.
    pub(crate) fn fields(&self) -> &BTreeSet<String> {
        &self.fields
    }

    /// The text for these fields.
    pub(crate) fn render(&self, fields: &BTreeMap<String, Value>) -> Result<String, RenderError> {
        let rendered = self.environment.get_template(NAME).and_then(|template| template.render(fields));
        rendered.map_err(|error| match error.kind() {
            ErrorKind::UndefinedError => RenderError::Undefined(error.to_string()),
            _ => RenderError::Other(error.to_string()),
        })
    }
}

/// Text as it is, all else as the JSON that the payload had: no model should read Python's `None` or `{'a': True}`.
fn write_value(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), minijinja::Error> {
    match value.kind() {
        ValueKind::None => Err(minijinja::Error::new(
            ErrorKind::UndefinedError,
            "a value is null, which is no text; write {{ field | default('…', true) }}",
        )),
        ValueKind::Bool | ValueKind::Seq | ValueKind::Map => {
            let json = serde_json::to_string(value).map_err(|error| {
                minijinja::Error::new(ErrorKind::BadSerialization, "not to be written as JSON").with_source(error)
            })?;
            Ok(out.write_str(&json)?)
        }
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// Filters, tests and functions are only looked up when they are used; so uses them, over nothing at all.
fn known_words(template: &minijinja::Template<'_, '_>) -> Result<(), String> {
    let unknown = |error: &minijinja::Error| {
        matches!(error.kind(), ErrorKind::UnknownFilter | ErrorKind::UnknownTest | ErrorKind::UnknownFunction)
    };
    match template.render(()) {
        Err(error) if unknown(&error) => Err(format!("not a template: {error}")),
        _ => Ok(()),
    }
}

/// The payload's fields as template values. Numbers that no machine number holds exactly stay the digits they are.
pub(crate) fn values(payload: &Body) -> Result<BTreeMap<String, Value>, String> {
    payload
        .fields()
        .map(|(name, raw)| Ok((name.to_owned(), value(raw).map_err(|error| format!("field {name:?}: {error}"))?)))
        .collect()
}

fn value(raw: &str) -> Result<Value, serde_json::Error> {
    if raw.starts_with(|c: char| c == '-' || c.is_ascii_digit()) {
        let exact = raw.parse::<i64>().is_ok_and(|number| number.to_string() == raw)
            || raw.parse::<u64>().is_ok_and(|number| number.to_string() == raw)
            || raw.parse::<f64>().is_ok_and(|number| number.to_string() == raw && raw.contains('.'));
        if !exact {
            return Ok(Value::from(raw));
        }
    }
    serde_json::from_str::<serde_json::Value>(raw).map(|value| Value::from(Serde(value)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn render(source: &str, payload: &str) -> Result<String, RenderError> {
        Template::new(source).unwrap().render(&values(&Body::parse(payload).unwrap()).unwrap())
    }

    #[test]
    fn a_payload_is_data() {
        let text = render("<{{ text }}>", r#"{"text":"{{ 7*7 }} <b> & \"q\""}"#).unwrap();
        assert_eq!(text, "<{{ 7*7 }} <b> & \"q\">");
    }

    #[test]
    fn strict_but_with_defaults() {
        assert!(matches!(render("{{ a }}", "{}"), Err(RenderError::Undefined(_))));
        assert!(matches!(render("{% if a %}x{% endif %}", "{}"), Err(RenderError::Undefined(_))));
        assert_eq!(render("{{ a | default('b') }}", "{}").unwrap(), "b");
        assert!(matches!(render("{{ a + [] }}", r#"{"a":1}"#), Err(RenderError::Other(_))));
    }

    #[test]
    fn what_is_no_text_is_written_as_json_and_null_is_a_hole() {
        let payload = r#"{"a":{"b":[1,true,"x",null]},"yes":true,"nothing":null}"#;
        assert_eq!(
            render("{{ a }} {{ yes }} {{ a.b }}", payload).unwrap(),
            r#"{"b":[1,true,"x",null]} true [1,true,"x",null]"#
        );
        let hole = render("{{ nothing }}", payload).unwrap_err();
        assert!(matches!(&hole, RenderError::Undefined(detail) if detail.contains("null")), "{hole:?}");
        assert_eq!(render("{{ nothing | default('-', true) }}{% if nothing %}x{% endif %}", payload).unwrap(), "-");
    }

    #[test]
    fn fields_are_found_and_globals_are_none() {
        let template =
            Template::new("{% for i in range(n) %}{{ i }}{{ a.b }}{% endfor %}{% set c = d %}{{ c }}").unwrap();
        assert_eq!(template.fields().iter().collect::<Vec<_>>(), ["a", "d", "n"]);
        assert!(Template::new("{{ a").unwrap_err().starts_with("not a template"));
        for unknown in ["{{ a | nosuch }}", "{{ nosuch(a) }}", "{% if a.b is nosuch %}x{% endif %}"] {
            assert!(Template::new(unknown).unwrap_err().contains("nosuch"), "{unknown}");
        }
        assert!(Template::new("{{ a.b.c | upper }}{% for i in a %}{{ i.x }}{% endfor %}{{ a[0] + 1 }}").is_ok());
        assert!(Template::new("{% include 'x' %}").is_err(), "nothing can be included");
    }

    #[test]
    fn numbers_keep_their_digits() {
        for number in
            ["9007199254740993", "18446744073709551615", "123456789012345678901234567890", "1e400", "-0", "0.1", "1.50"]
        {
            assert_eq!(render("{{ n }}", &format!(r#"{{"n":{number}}}"#)).unwrap(), number);
        }
        assert_eq!(render("{{ n + 1 }}", r#"{"n":1}"#).unwrap(), "2");
        assert_eq!(render("{{ o | tojson }}", r#"{"o":{"a":[1,true]}}"#).unwrap(), r#"{"a": [1, true]}"#);
    }

    #[test]
    fn too_deep_is_an_error_and_no_crash() {
        let deep = format!(r#"{{"a":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
        assert!(values(&Body::parse(&deep).unwrap()).unwrap_err().contains("recursion limit"));
    }
}
