//! Server-sent events: bytes in, whole events out.
//!
//! Works on bytes, so that a character cut in two by the network is whole again before anybody decodes it. Lines end in
//! CR, LF or CRLF, in any mix and across reads. Comments (keep-alives) produce nothing. Memory is bounded per event.

/// One event. `name` is empty unless an `event:` line gave one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Event {
    /// The value of the last `event:` line.
    pub name: String,
    /// The `data:` lines, joined by newlines. Invalid UTF-8 becomes U+FFFD.
    pub data: String,
}

/// A line, or the data of one event, was longer than allowed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is larger than {0} bytes")]
pub struct TooLarge(pub usize);

/// Cuts a byte stream into events.
#[derive(Debug)]
pub struct EventParser {
    line: Vec<u8>,
    name: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    after_cr: bool,
    at_start: bool,
    bytes_max: usize,
}

impl EventParser {
    /// A parser that refuses lines and events beyond `bytes_max` bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self {
            line: Vec::new(),
            name: Vec::new(),
            data: Vec::new(),
            has_data: false,
            after_cr: false,
            at_start: true,
            bytes_max,
        }
    }

    /// Takes the next bytes and appends the events they complete.
    ///
    /// # Errors
    /// `TooLarge` when a line or an event exceeds the bound; the parser is of no more use then.
    pub fn push(&mut self, mut bytes: &[u8], events: &mut Vec<Event>) -> Result<(), TooLarge> {
        while let Some(&first) = bytes.first() {
            if std::mem::take(&mut self.after_cr) && first == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let end = bytes.iter().position(|&byte| byte == b'\n' || byte == b'\r');
            let taken = end.unwrap_or(bytes.len());
            if self.line.len() + taken > self.bytes_max {
                return Err(TooLarge(self.bytes_max));
            }
            self.line.extend_from_slice(&bytes[..taken]);
            let Some(end) = end else { return Ok(()) };
            self.after_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            self.end_line(events)?;
        }
        Ok(())
    }

    /// The event that the end of the stream completes: some providers close right after the last line, without a blank one.
    ///
    /// # Errors
    /// `TooLarge`, as in `push`.
    pub fn finish(mut self) -> Result<Option<Event>, TooLarge> {
        let mut events = Vec::new();
        if !self.line.is_empty() {
            self.end_line(&mut events)?;
        }
        self.line.clear();
        self.end_line(&mut events)?;
        Ok(events.pop())
    }

    fn end_line(&mut self, events: &mut Vec<Event>) -> Result<(), TooLarge> {
        let line = std::mem::take(&mut self.line);
        let mut content = line.as_slice();
        if std::mem::take(&mut self.at_start) {
            content = content.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(content);
        }
        if content.is_empty() {
            self.end_event(events);
        } else {
            let (field, value) = match content.iter().position(|&byte| byte == b':') {
                Some(colon) => (&content[..colon], &content[colon + 1..]),
                None => (content, &b""[..]),
            };
            let value = value.strip_prefix(b" ").unwrap_or(value);
            match field {
                b"data" => {
                    if self.data.len() + value.len() + 1 > self.bytes_max {
                        return Err(TooLarge(self.bytes_max));
                    }
                    if self.has_data {
                        self.data.push(b'\n');
                    }
                    self.has_data = true;
                    self.data.extend_from_slice(value);
                }
                b"event" => self.name = value.to_vec(),
                // An empty field name is a comment; id, retry and unknown fields mean nothing here.
                _ => {}
            }
        }
        // The buffer is used again, so that a stream of tokens does not allocate per line.
        self.line = line;
        self.line.clear();
        Ok(())
    }

    fn end_event(&mut self, events: &mut Vec<Event>) {
        let name = std::mem::take(&mut self.name);
        let data = std::mem::take(&mut self.data);
        if std::mem::take(&mut self.has_data) {
            events.push(Event { name: text(name), data: text(data) });
        }
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn parse(chunks: &[&[u8]]) -> Vec<Event> {
        let mut parser = EventParser::new(1000);
        let mut events = Vec::new();
        for chunk in chunks {
            parser.push(chunk, &mut events).unwrap();
        }
        events.extend(parser.finish().unwrap());
        events
    }

    fn data(events: &[Event]) -> Vec<&str> {
        events.iter().map(|event| event.data.as_str()).collect()
    }

    #[test]
    fn the_grammar() {
        let events = parse(&[b"\xEF\xBB\xBFdata: a\n\n: keep-alive\n\nevent: error\ndata:b\ndata:  c\nid: 7\n\ndata\n\nevent: lonely\n\nretry: 5\ndata: [DONE]"]);
        assert_eq!(data(&events), ["a", "b\n c", "", "[DONE]"]);
        assert_eq!(events.iter().map(|event| event.name.as_str()).collect::<Vec<_>>(), ["", "error", "", ""]);
    }

    #[test]
    fn a_line_beyond_the_bound_is_refused_before_it_is_kept() {
        let mut parser = EventParser::new(8);
        assert_eq!(parser.push(b"data: 123456", &mut Vec::new()), Err(TooLarge(8)));
        let mut parser = EventParser::new(8);
        assert_eq!(
            parser.push(b"data:123\ndata:123\ndata:123\n", &mut Vec::new()),
            Err(TooLarge(8)),
            "also over many lines"
        );
    }

    proptest! {
        #[test]
        fn events_survive_any_line_ending_and_any_cut(
            texts in prop::collection::vec(prop::collection::vec("[^\r\n\u{FEFF}]{0,12}", 1..4), 0..6),
            endings in prop::collection::vec(0usize..3, 64),
            cuts in prop::collection::vec(1usize..9, 1..20),
        ) {
            let mut bytes = Vec::new();
            let mut ending = endings.iter().cycle().map(|&i| ["\n", "\r", "\r\n"][i]);
            for lines in &texts {
                for line in lines {
                    bytes.extend(format!("data: {line}{}", ending.next().unwrap()).bytes());
                    bytes.extend(format!(": comment{}", ending.next().unwrap()).bytes());
                }
                // A CR ending followed by an LF blank line would be one CRLF: the blank line repeats until it is blank.
                let last = if bytes.last() == Some(&b'\r') { "\r" } else { ending.next().unwrap() };
                bytes.extend(last.bytes());
            }
            let mut parser = EventParser::new(10_000);
            let mut events = Vec::new();
            let (mut rest, mut cut) = (bytes.as_slice(), cuts.iter().cycle());
            while !rest.is_empty() {
                let (head, tail) = rest.split_at((*cut.next().unwrap()).min(rest.len()));
                parser.push(head, &mut events).unwrap();
                rest = tail;
            }
            events.extend(parser.finish().unwrap());
            let expected: Vec<String> = texts.iter().map(|lines| lines.join("\n")).collect();
            prop_assert_eq!(data(&events), expected);
        }

        #[test]
        fn no_bytes_break_it(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..50), 0..10)) {
            let mut parser = EventParser::new(200);
            let mut events = Vec::new();
            for chunk in &chunks {
                if parser.push(chunk, &mut events).is_err() { return Ok(()); }
            }
            let _ = parser.finish();
        }
    }
}
