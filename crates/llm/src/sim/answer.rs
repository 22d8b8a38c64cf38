//! The simulated answer: derived from the input alone, so that anybody can tell whose answer it is.

use serde_json::Value;

/// The longest part of the first sentence that is repeated, in characters.
const SENTENCE_CHARS_MAX: usize = 100;

/// What the simulated provider answers to a user message: its first sentence, shortened, and a checksum of the whole.
#[must_use]
pub fn expected_answer(user_text: &str) -> String {
    format!("{} [{}]", first_sentence(user_text), checksum(user_text))
}

/// A short, stable checksum of a text: FNV-1a, 48 bits, in hexadecimal.
#[must_use]
pub fn checksum(text: &str) -> String {
    let hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{:012x}", (hash ^ (hash >> 48)) & 0xffff_ffff_ffff)
}

fn first_sentence(text: &str) -> String {
    let line = text
        .lines()
        .map(|line| line.trim_start_matches(['#', '>', '*', '-', ' ', '\t']).trim())
        .find(|line| !line.is_empty())
        .unwrap_or("(nothing)");
    let mut end = line.len();
    for (at, c) in line.char_indices() {
        let after = at + c.len_utf8();
        if matches!(c, '.' | '!' | '?') && line[after..].starts_with(char::is_whitespace) {
            end = after;
            break;
        }
    }
    let sentence = &line[..end];
    if sentence.chars().count() <= SENTENCE_CHARS_MAX {
        return sentence.to_owned();
    }
    let cut: String = sentence.chars().take(SENTENCE_CHARS_MAX).collect();
    format!("{}…", cut.rsplit_once(' ').map_or(cut.as_str(), |(head, _)| head))
}

/// The text of the last user message of a chat-completions body.
pub(crate) fn user_text(body: &Value) -> String {
    let messages = body["messages"].as_array().map_or(&[][..], Vec::as_slice);
    let last = messages.iter().rev().find(|message| message["role"] == "user");
    match last.map(|message| &message["content"]) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}

/// The answer to a request: text, or JSON where JSON was asked for.
pub(crate) fn answer(body: &Value, user_text: &str) -> String {
    let expected = expected_answer(user_text);
    match body["response_format"]["type"].as_str() {
        Some("json_object" | "json_schema") => serde_json::json!({ "answer": expected }).to_string(),
        _ => expected,
    }
}

/// Pieces as a tokenizer would make them, roughly: words with the space before them.
pub(crate) fn tokens(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut start = 0;
    for (at, c) in text.char_indices() {
        if at > start && (c.is_whitespace() || at - start >= 8) {
            pieces.push(&text[start..at]);
            start = at;
        }
    }
    if start < text.len() {
        pieces.push(&text[start..]);
    }
    pieces
}

/// Tokens of a prompt: about four bytes each, and some for the frame of each message.
pub(crate) fn prompt_tokens(body: &Value) -> usize {
    let messages = body["messages"].as_array().map_or(&[][..], Vec::as_slice);
    messages.iter().map(|message| message["content"].to_string().len().div_ceil(4) + 3).sum::<usize>() + 3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stable_and_telling() {
        assert_eq!(expected_answer("A tale. Of two."), format!("A tale. [{}]", checksum("A tale. Of two.")));
        assert_eq!(expected_answer("\n# Title\nText."), format!("Title [{}]", checksum("\n# Title\nText.")));
        assert_ne!(expected_answer("Same. One"), expected_answer("Same. Two"));
        assert_eq!(checksum(""), "9ce48422e8d7", "a change here breaks stored expectations of others");
        let long = "word ".repeat(50);
        assert!(expected_answer(&long).starts_with("word word") && expected_answer(&long).contains('…'));
        assert!(expected_answer("").starts_with("(nothing) ["));
    }

    #[test]
    fn tokens_lose_nothing() {
        let text = "Ein längerer Satz, ohne  Verlust: 😀 unbelievably-long-word";
        assert_eq!(tokens(text).concat(), text);
        assert!(tokens(text).iter().all(|token| token.len() <= 12));
    }
}
