//! What a program said: its output, bounded, and what is made of it.

use std::borrow::Cow;
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::io::{AsyncRead, AsyncReadExt};

/// The end of an output, and how much came before it.
pub(super) struct Tail {
    cap: usize,
    bytes: Vec<u8>,
    dropped: u64,
}

impl Tail {
    /// Keeps the last `cap` bytes.
    pub(super) fn new(cap: usize) -> Self {
        Self { cap, bytes: Vec::new(), dropped: 0 }
    }

    /// Reads to the end. What was read so far stays when the future is dropped.
    pub(super) async fn fill(&mut self, mut from: impl AsyncRead + Unpin) {
        let mut piece = vec![0; 64 << 10];
        loop {
            match from.read(&mut piece).await {
                Ok(0) | Err(_) => return,
                Ok(read) => self.push(&piece[..read]),
            }
        }
    }

    fn push(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
        // Some room above the cap, so that the bytes are not moved for every piece.
        if self.bytes.len() > self.cap + self.cap / 2 {
            self.cut();
        }
    }

    fn cut(&mut self) {
        let surplus = self.bytes.len().saturating_sub(self.cap);
        self.bytes.drain(..surplus);
        self.dropped += surplus as u64;
    }

    /// The text, without the line end behind it.
    pub(super) fn text(&mut self) -> Cow<'_, str> {
        self.cut();
        String::from_utf8_lossy(self.bytes.trim_ascii_end())
    }

    /// How many bytes there were before the ones kept.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }
}

/// The result on a standard output: all of it if that is JSON, else its last JSON value that begins on a line of its own
/// and ends with its line or with the output, else the text. Nothing at all is `null`.
///
/// Before the last line only objects and arrays count: a number alone on a line is more likely part of a text.
pub(super) fn result(output: &mut Tail) -> Result<Box<RawValue>, serde_json::Error> {
    let text = output.text().into_owned();
    let json = |part: &str| serde_json::from_str::<Box<RawValue>>(part.trim()).ok();
    let text = text.trim();
    if text.is_empty() {
        return Ok(RawValue::NULL.to_owned());
    }
    if output.dropped() == 0
        && let Some(whole) = json(text)
    {
        return Ok(whole);
    }
    let mut end = text.len();
    while end > 0 {
        let start = text[..end].rfind('\n').map_or(0, |at| at + 1);
        let line = &text[start..end];
        if (end == text.len() || line.trim_start().starts_with(['{', '[']))
            && let Some(value) = json(line)
        {
            return Ok(value);
        }
        if line.starts_with(['{', '['])
            && let Some(value) = json(&text[start..])
        {
            return Ok(value);
        }
        end = start.saturating_sub(1);
    }
    match output.dropped() {
        0 => serde_json::value::to_raw_value(text),
        dropped => serde_json::value::to_raw_value(&format!("[{dropped} bytes left out]\n{text}")),
    }
}

/// What a program that says "not now" may add as a line of JSON.
#[derive(Deserialize)]
pub(super) struct NotNow {
    delay_ms: u64,
    reason: Option<String>,
}

impl NotNow {
    /// The last line that is such an object.
    pub(super) fn find(text: &str) -> Option<Self> {
        text.lines().rev().filter(|line| line.trim_start().starts_with('{')).find_map(|l| serde_json::from_str(l).ok())
    }

    /// How long to wait.
    pub(super) fn delay(&self) -> Duration {
        Duration::from_millis(self.delay_ms)
    }

    /// Why, if it said so.
    pub(super) fn reason(self) -> Option<String> {
        self.reason
    }
}

/// The last lines of a text, for an error: at most `lines` of them and `bytes` in all.
pub(super) fn last_lines(text: &str, lines: usize, bytes: usize) -> &str {
    let text = text.trim();
    let first = text.rmatch_indices('\n').nth(lines.saturating_sub(1)).map_or(0, |(at, _)| at + 1);
    let mut start = first.max(text.len().saturating_sub(bytes));
    while !text.is_char_boundary(start) {
        start += 1;
    }
    text[start..].trim_start()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn parsed(output: &str) -> String {
        let mut tail = Tail::new(1_000);
        tail.push(output.as_bytes());
        result(&mut tail).unwrap().get().to_owned()
    }

    #[test]
    fn the_last_json_is_the_result() {
        for (output, expected) in [
            ("", "null"),
            (" \n", "null"),
            ("{\"a\": 1}\n", "{\"a\": 1}"),
            ("{\n  \"a\": 1\n}\n", "{\n  \"a\": 1\n}"),
            ("loading\n{\"a\":1}\n", "{\"a\":1}"),
            ("{\"a\":1}\n{\"a\":2}\n", "{\"a\":2}"),
            ("{\"a\":1}\nbye\n", "{\"a\":1}"),
            ("[info] start\n{\n\"a\": [\n1]\n}\n", "{\n\"a\": [\n1]\n}"),
            ("counting\n42", "42"),
            ("42\nis the answer", "\"42\\nis the answer\""),
            ("just text\n", "\"just text\""),
            ("{\"a\":", "\"{\\\"a\\\":\""),
            ("12345678901234567890123", "12345678901234567890123"),
        ] {
            assert_eq!(parsed(output), expected, "{output:?}");
        }
    }

    #[test]
    fn a_long_output_is_bounded_and_its_end_counts() {
        let mut tail = Tail::new(100);
        for _ in 0..1_000 {
            tail.push(b"0123456789\n");
            assert!(tail.bytes.len() <= 150);
        }
        let text = result(&mut tail).unwrap();
        assert!(text.get().starts_with("\"[10900 bytes left out]") || text.get() == "0123456789", "{text}");
        tail.push(b"{\"sum\":7}\n");
        assert_eq!(result(&mut tail).unwrap().get(), "{\"sum\":7}");
        // The end of something larger is not taken for the whole.
        let mut tail = Tail::new(3);
        tail.push(b"abc 123");
        assert_eq!(result(&mut tail).unwrap().get(), "123");
    }

    #[test]
    fn last_lines_are_bounded_both_ways() {
        assert_eq!(last_lines("a\nb\nc\n", 2, 100), "b\nc");
        assert_eq!(last_lines("a\nb", 5, 100), "a\nb");
        assert_eq!(last_lines("", 5, 100), "");
        assert_eq!(last_lines("äöü", 5, 3), "ü");
    }

    #[test]
    fn not_now_is_read_from_the_last_line_that_says_it() {
        let found =
            NotNow::find("{\"delay_ms\": 1}\nbusy\n{\"delay_ms\": 1500, \"reason\": \"maintenance\"}\nbye").unwrap();
        assert_eq!(found.delay(), Duration::from_millis(1_500));
        assert_eq!(found.reason().as_deref(), Some("maintenance"));
        assert!(NotNow::find("{\"delay_ms\": -1}\n{\"delay\": 3}").is_none());
    }
}
