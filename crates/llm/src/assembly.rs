//! An answer in the making: put together out of stream chunks, or taken from one JSON body.
//!
//! Lenient where servers differ: usage may come with any chunk, tool calls may lack an index, content may come in parts.

use crate::answer::Usage;
use crate::text::clean_strings;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// An answer in the making.
#[derive(Debug, Default)]
pub(crate) struct Assembly {
    choices: BTreeMap<u64, Choice>,
    /// How many choices were asked for; fewer are no finished answer unless the provider says that it has ended.
    wanted: usize,
    pub(crate) model: Option<String>,
    pub(crate) id: Option<String>,
    pub(crate) usage: Usage,
    /// Bytes held so far, about: content and everything around it, for the cap.
    pub(crate) bytes: usize,
    pub(crate) cleaned: bool,
}

#[derive(Debug, Default)]
struct Choice {
    texts: BTreeMap<String, String>,
    other: Map<String, Value>,
    tool_calls: Vec<ToolCall>,
    finish_reason: Option<String>,
    /// Bytes of fields that are no content.
    around: usize,
}

#[derive(Debug, Default)]
struct ToolCall {
    index: Option<u64>,
    id: String,
    name: String,
    arguments: String,
    other: Map<String, Value>,
}

/// The most choices that are kept apart; the largest `n` that any known provider takes. What numbers itself beyond is the last.
const CHOICES_MAX: usize = 128;
/// What a tool call counts for against the cap, empty as it may be: a stream of nothing but new calls must end too.
const TOOL_CALL_BYTES: usize = 1 << 10;

/// The message fields that arrive in pieces; all others arrive whole.
const PIECES: [&str; 4] = ["content", "refusal", "reasoning", "reasoning_content"];

impl Assembly {
    /// For an answer of this many choices.
    pub(crate) fn new(wanted: usize) -> Self {
        Self { wanted: wanted.min(CHOICES_MAX), ..Self::default() }
    }

    /// Takes one stream chunk, or one whole `chat.completion`. Says whether it carried content.
    pub(crate) fn take(&mut self, chunk: &Value) -> bool {
        let mut content = 0;
        for (field, name) in [(&mut self.model, "model"), (&mut self.id, "id")] {
            let text = chunk.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
            // The same in every chunk, mostly.
            if let Some(text) = text.filter(|text| field.as_deref() != Some(text)) {
                *field = Some(text.to_owned());
            }
        }
        // Groq has it in a field of its own, Moonshot inside the choice.
        let places = [Some(chunk), chunk.get("x_groq"), chunk.get("choices").and_then(|choices| choices.get(0))];
        for usage in places.into_iter().flatten().filter_map(|place| place.get("usage")) {
            self.usage.take(usage);
        }
        for choice in chunk.get("choices").and_then(Value::as_array).into_iter().flatten() {
            let index = choice.get("index").and_then(Value::as_u64).unwrap_or(0).min(CHOICES_MAX as u64 - 1);
            let entry = self.choices.entry(index).or_default();
            for part in ["delta", "message"] {
                if let Some(Value::Object(delta)) = choice.get(part) {
                    let around = entry.around;
                    let taken = entry.take(delta);
                    content += taken;
                    self.bytes = (self.bytes + taken + entry.around).saturating_sub(around);
                }
            }
            // The completions API of old has the text beside the index.
            if let Some(text) = choice.get("text").and_then(Value::as_str) {
                let taken = append(&mut entry.texts, "content", text);
                content += taken;
                self.bytes += taken;
            }
            if let Some(reason) = choice.get("finish_reason").and_then(Value::as_str) {
                entry.finish_reason = Some(reason.to_owned());
            }
        }
        content > 0
    }

    /// Every choice has said why it stopped, and there are as many as were asked for, at least one.
    pub(crate) fn finished(&self) -> bool {
        self.choices.len() >= self.wanted.max(1) && self.choices.values().all(|choice| choice.finish_reason.is_some())
    }

    /// Nothing at all has been answered.
    pub(crate) fn is_empty(&self) -> bool {
        self.choices.is_empty()
    }

    /// The text of the first choice so far.
    pub(crate) fn text(&self) -> &str {
        self.first().and_then(|choice| choice.texts.get("content")).map_or("", String::as_str)
    }

    pub(crate) fn refusal(&self) -> Option<&str> {
        self.first()?.texts.get("refusal").map(String::as_str).filter(|text| !text.is_empty())
    }

    pub(crate) fn finish_reason(&self) -> Option<&str> {
        self.first()?.finish_reason.as_deref()
    }

    pub(crate) fn calls_tools(&self) -> bool {
        self.first().is_some_and(|choice| !choice.tool_calls.is_empty() || choice.other.contains_key("function_call"))
    }

    /// Whether a tool call of any choice has arguments that are no JSON: the sign of a call cut in the middle.
    pub(crate) fn has_broken_tool_call(&self) -> bool {
        self.choices.values().flat_map(|choice| &choice.tool_calls).any(|call| {
            !call.arguments.trim().is_empty() && serde_json::from_str::<&RawValue>(&call.arguments).is_err()
        })
    }

    /// The first choice's message, and all choices where there are more than one. `clean` is applied to every string.
    pub(crate) fn messages(&mut self, clean: &impl Fn(&str) -> String) -> (Value, Vec<Value>) {
        let mut all: Vec<Value> = std::mem::take(&mut self.choices)
            .into_iter()
            .map(|(index, choice)| {
                let finish_reason = choice.finish_reason.clone();
                json!({ "index": index, "message": choice.message(), "finish_reason": finish_reason })
            })
            .collect();
        for choice in &mut all {
            self.cleaned |= clean_strings(choice, clean);
        }
        let first = all.first().map(|choice| choice["message"].clone()).unwrap_or_default();
        if all.len() < 2 {
            all.clear();
        }
        (first, all)
    }

    fn first(&self) -> Option<&Choice> {
        self.choices.values().next()
    }
}

impl Choice {
    /// Takes a delta and returns the bytes of content it brought.
    fn take(&mut self, delta: &Map<String, Value>) -> usize {
        let mut bytes = 0;
        for (name, value) in delta {
            match value {
                Value::Null => {}
                Value::String(text) if PIECES.contains(&name.as_str()) => {
                    bytes += append(&mut self.texts, name, text);
                }
                Value::Array(parts) if name == "content" => {
                    for text in parts.iter().filter_map(|part| part.get("text").and_then(Value::as_str)) {
                        bytes += append(&mut self.texts, name, text);
                    }
                }
                Value::Array(calls) if name == "tool_calls" => {
                    bytes += calls.iter().map(|call| self.take_tool_call(call)).sum::<usize>();
                }
                Value::Object(call) if name == "function_call" => bytes += self.take_function_call(call),
                _ => put(&mut self.other, name, value, &mut self.around),
            }
        }
        bytes
    }

    /// Most servers number their calls; some number none, some give every one the number 0. A new id is always a new call.
    fn take_tool_call(&mut self, delta: &Value) -> usize {
        let text = |pointer: &str| delta.pointer(pointer).and_then(Value::as_str).unwrap_or("");
        let (index, id) = (delta.get("index").and_then(Value::as_u64), text("/id"));
        let same = |call: &ToolCall| {
            (index.is_none() || call.index == index) && (id.is_empty() || call.id.is_empty() || call.id == id)
        };
        let position = match self.tool_calls.iter().rposition(same) {
            Some(position) => position,
            None => {
                self.tool_calls.push(ToolCall { index, ..ToolCall::default() });
                self.around += TOOL_CALL_BYTES;
                self.tool_calls.len() - 1
            }
        };
        let call = &mut self.tool_calls[position];
        if call.id.is_empty() {
            call.id = id.to_owned();
            self.around += id.len();
        }
        for (name, value) in delta.as_object().into_iter().flatten() {
            if !["index", "id", "function"].contains(&name.as_str()) && !value.is_null() {
                put(&mut call.other, name, value, &mut self.around);
            }
        }
        let (name, arguments) = (text("/function/name"), text("/function/arguments"));
        call.name.push_str(name);
        call.arguments.push_str(arguments);
        name.len() + arguments.len()
    }

    /// The predecessor of tool calls: one call, in pieces.
    fn take_function_call(&mut self, delta: &Map<String, Value>) -> usize {
        let call = self.other.entry("function_call").or_insert_with(|| json!({}));
        if !call.is_object() {
            *call = json!({});
        }
        let mut bytes = 0;
        for (name, value) in delta {
            let Some(piece) = value.as_str() else { continue };
            bytes += piece.len();
            match &mut call[name.as_str()] {
                Value::String(whole) => whole.push_str(piece),
                missing => {
                    *missing = Value::from(piece);
                    bytes += name.len();
                }
            }
        }
        bytes
    }

    fn message(self) -> Value {
        let mut message = Map::new();
        message.insert("role".to_owned(), Value::from("assistant"));
        message.insert("content".to_owned(), Value::Null);
        message.extend(self.other);
        message.extend(
            self.texts.into_iter().filter(|(_, text)| !text.is_empty()).map(|(name, text)| (name, Value::from(text))),
        );
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.into_iter().map(|call| {
                let mut value = Map::new();
                value.insert("id".to_owned(), Value::from(call.id));
                value.insert("type".to_owned(), Value::from("function"));
                value.extend(call.other);
                value.insert("function".to_owned(), json!({ "name": call.name, "arguments": call.arguments }));
                Value::from(value)
            });
            message.insert("tool_calls".to_owned(), calls.collect());
        }
        Value::from(message)
    }
}

/// Sets a field, and counts what it weighs more than what it replaces.
fn put(map: &mut Map<String, Value>, name: &str, value: &Value, around: &mut usize) {
    *around += name.len() + weight(value);
    if let Some(old) = map.insert(name.to_owned(), value.clone()) {
        *around = around.saturating_sub(name.len() + weight(&old));
    }
}

/// About how much memory a value takes.
fn weight(value: &Value) -> usize {
    let inside = match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(weight).sum(),
        Value::Object(map) => map.iter().map(|(name, value)| name.len() + weight(value)).sum(),
        _ => 0,
    };
    size_of::<Value>() + inside
}

/// Appends to a text, which begins with its first piece.
fn append(texts: &mut BTreeMap<String, String>, name: &str, piece: &str) -> usize {
    match texts.get_mut(name) {
        Some(text) => text.push_str(piece),
        None => drop(texts.insert(name.to_owned(), piece.to_owned())),
    }
    piece.len()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn assemble(chunks: &[Value]) -> Assembly {
        let mut assembly = Assembly::default();
        for chunk in chunks {
            assembly.take(chunk);
        }
        assembly
    }

    fn delta(delta: Value) -> Value {
        json!({ "choices": [{ "index": 0, "delta": delta, "finish_reason": null }] })
    }

    #[test]
    fn tool_calls_in_pieces() {
        for (first, second) in [(json!(0), json!(1)), (Value::Null, Value::Null), (json!(0), json!(0))] {
            let mut assembly = assemble(&[
                delta(json!({ "role": "assistant", "content": null })),
                delta(
                    json!({ "tool_calls": [{ "index": first, "id": "a", "type": "function", "function": { "name": "add", "arguments": "" } }] }),
                ),
                delta(json!({ "tool_calls": [{ "index": first, "function": { "arguments": "{\"n\":9007199254" } }] })),
                delta(json!({ "tool_calls": [{ "index": first, "function": { "arguments": "740993}" } }] })),
                delta(
                    json!({ "tool_calls": [{ "index": second, "id": "b", "function": { "name": "sub", "arguments": "{}" } }] }),
                ),
            ]);
            assert!(!assembly.has_broken_tool_call());
            let (message, _) = assembly.messages(&str::to_owned);
            assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{\"n\":9007199254740993}");
            assert_eq!(message["tool_calls"][1]["function"]["name"], "sub");
            assert_eq!(message["content"], Value::Null);
        }
    }

    #[test]
    fn content_counts_and_keep_alive_chunks_do_not() {
        let mut assembly = Assembly::default();
        assert!(!assembly.take(&delta(json!({ "role": "assistant", "content": "" }))));
        assert!(!assembly.take(&json!({ "choices": [] })));
        assert!(assembly.take(&delta(json!({ "reasoning_content": "hm" }))));
        assert!(assembly.take(&delta(json!({ "content": [{ "type": "text", "text": "parts" }] }))));
        assert_eq!(assembly.text(), "parts");
    }

    #[test]
    fn all_that_is_held_counts_against_the_cap() {
        let many = |delta: &dyn Fn(usize) -> Value| {
            assemble(&(0..1000).map(|i| json!({ "choices": [{ "index": i, "delta": delta(i) }] })).collect::<Vec<_>>())
        };
        let call = many(&|i| json!({ "tool_calls": [{ "id": i.to_string() }] }));
        assert!(call.bytes > 1000 * TOOL_CALL_BYTES, "{}", call.bytes);
        assert_eq!(call.choices.len(), 128, "a provider cannot open choices without end");
        let field =
            assemble(&(0..1000).map(|i| delta(json!({ format!("f{i}"): "x".repeat(1000) }))).collect::<Vec<_>>());
        assert!(field.bytes > 1_000_000, "{}", field.bytes);
        let role = assemble(&vec![delta(json!({ "role": "assistant" })); 1000]);
        assert!(role.bytes < 1000, "what is replaced is not held: {}", role.bytes);
    }

    #[test]
    fn a_function_call_of_old_in_pieces_and_in_wrong_types() {
        let mut assembly = assemble(&[
            delta(json!({ "function_call": "none" })),
            delta(json!({ "function_call": { "name": "f", "arguments": "{\"a\"" } })),
            delta(json!({ "function_call": { "arguments": ":1}", "name": null } })),
        ]);
        let (message, _) = assembly.messages(&str::to_owned);
        assert_eq!(message["function_call"], json!({ "name": "f", "arguments": "{\"a\":1}" }));
    }

    #[test]
    fn usage_from_any_chunk_and_in_both_vocabularies() {
        let mut assembly = assemble(&[
            json!({ "usage": null }),
            json!({
                "choices": [{ "index": 0, "delta": {} }],
                "usage": { "prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": { "cached_tokens": 4 }, "cost": 0.00012 },
            }),
        ]);
        assert_eq!((assembly.usage.input_tokens, assembly.usage.cached_tokens), (Some(10), Some(4)));
        assert_eq!(assembly.usage.cost_usd.as_deref(), Some("0.00012"));
        assembly.take(&json!({ "usage": { "output_tokens": 7, "output_tokens_details": { "reasoning_tokens": 2 } } }));
        assert_eq!((assembly.usage.output_tokens, assembly.usage.reasoning_tokens), (Some(7), Some(2)));
        let odd = assemble(&[
            json!({ "x_groq": { "usage": { "prompt_tokens": 7 } } }),
            json!({ "choices": [{ "index": 0, "delta": {}, "usage": { "completion_tokens": 8.0, "cost": "0.5" } }] }),
            json!({ "usage": { "prompt_tokens": -7, "completion_tokens": 8.5, "cost": -1 } }),
        ]);
        assert_eq!((odd.usage.input_tokens, odd.usage.output_tokens), (Some(7), Some(8)));
        assert_eq!(odd.usage.cost_usd.as_deref(), Some("0.5"));
    }
}
