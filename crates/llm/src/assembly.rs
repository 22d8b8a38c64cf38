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
    pub(crate) model: Option<String>,
    pub(crate) id: Option<String>,
    pub(crate) usage: Usage,
    /// Bytes of content so far, for the cap.
    pub(crate) bytes: usize,
    pub(crate) cleaned: bool,
}

#[derive(Debug, Default)]
struct Choice {
    texts: BTreeMap<String, String>,
    other: Map<String, Value>,
    tool_calls: Vec<ToolCall>,
    finish_reason: Option<String>,
}

#[derive(Debug, Default)]
struct ToolCall {
    index: Option<u64>,
    id: String,
    name: String,
    arguments: String,
    other: Map<String, Value>,
}

/// The message fields that arrive in pieces; all others arrive whole.
const PIECES: [&str; 4] = ["content", "refusal", "reasoning", "reasoning_content"];

impl Assembly {
    /// Takes one stream chunk, or one whole `chat.completion`. Says whether it carried content.
    pub(crate) fn take(&mut self, chunk: &Value) -> bool {
        let before = self.bytes;
        for (field, value) in [(&mut self.model, "/model"), (&mut self.id, "/id")] {
            if let Some(text) = chunk.pointer(value).and_then(Value::as_str).filter(|text| !text.is_empty()) {
                *field = Some(text.to_owned());
            }
        }
        if let Some(usage) = chunk.get("usage") {
            self.usage.take(usage);
        }
        for choice in chunk.get("choices").and_then(Value::as_array).into_iter().flatten() {
            let index = choice.get("index").and_then(Value::as_u64).unwrap_or(0);
            let entry = self.choices.entry(index).or_default();
            for part in ["delta", "message"] {
                if let Some(Value::Object(delta)) = choice.get(part) {
                    self.bytes += entry.take(delta);
                }
            }
            // The completions API of old has the text beside the index.
            if let Some(text) = choice.get("text").and_then(Value::as_str) {
                self.bytes += append(entry.texts.entry("content".to_owned()).or_default(), text);
            }
            if let Some(reason) = choice.get("finish_reason").and_then(Value::as_str) {
                entry.finish_reason = Some(reason.to_owned());
            }
        }
        self.bytes > before
    }

    /// Every choice seen so far has said why it stopped, and there is at least one.
    pub(crate) fn finished(&self) -> bool {
        !self.choices.is_empty() && self.choices.values().all(|choice| choice.finish_reason.is_some())
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
                    bytes += append(self.texts.entry(name.clone()).or_default(), text);
                }
                Value::Array(parts) if name == "content" => {
                    for text in parts.iter().filter_map(|part| part.get("text").and_then(Value::as_str)) {
                        bytes += append(self.texts.entry(name.clone()).or_default(), text);
                    }
                }
                Value::Array(calls) if name == "tool_calls" => {
                    bytes += calls.iter().map(|call| self.take_tool_call(call)).sum::<usize>();
                }
                Value::Object(call) if name == "function_call" => bytes += self.take_function_call(call),
                _ => {
                    self.other.insert(name.clone(), value.clone());
                }
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
                self.tool_calls.len() - 1
            }
        };
        let call = &mut self.tool_calls[position];
        if call.id.is_empty() {
            call.id = id.to_owned();
        }
        for (name, value) in delta.as_object().into_iter().flatten() {
            if !["index", "id", "function"].contains(&name.as_str()) && !value.is_null() {
                call.other.insert(name.clone(), value.clone());
            }
        }
        append(&mut call.name, text("/function/name")) + append(&mut call.arguments, text("/function/arguments"))
    }

    /// The predecessor of tool calls: one call, in pieces.
    fn take_function_call(&mut self, delta: &Map<String, Value>) -> usize {
        let call = self.other.entry("function_call").or_insert_with(|| json!({}));
        let mut bytes = 0;
        for (name, value) in delta {
            if let Some(piece) = value.as_str() {
                let whole = call.get(name).and_then(Value::as_str).unwrap_or("").to_owned() + piece;
                call[name.as_str()] = Value::from(whole);
                bytes += piece.len();
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

fn append(text: &mut String, piece: &str) -> usize {
    text.push_str(piece);
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
    }
}
