//! JSON text, indented for people, character by character: numbers stay as they are, however long.

/// Indents JSON text that is valid.
pub(crate) fn indent(json: &str) -> String {
    let mut out = String::with_capacity(json.len() * 2);
    let mut depth = 0_usize;
    let mut characters = json.chars().filter(not_space()).peekable();
    let mut in_string = false;
    let mut escaped = false;
    while let Some(c) = characters.next() {
        if in_string {
            out.push(c);
            (escaped, in_string) = (c == '\\' && !escaped, c != '"' || escaped);
            continue;
        }
        match c {
            '"' => {
                in_string = true;
                out.push(c);
            }
            '{' | '[' => {
                out.push(c);
                if let Some(end) = characters.next_if(|next| matches!(next, '}' | ']')) {
                    out.push(end);
                } else {
                    depth += 1;
                    line(&mut out, depth);
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                line(&mut out, depth);
                out.push(c);
            }
            ',' => {
                out.push(c);
                line(&mut out, depth);
            }
            ':' => out.push_str(": "),
            _ => out.push(c),
        }
    }
    out
}

/// Whether a character is kept: spaces outside of strings are not.
fn not_space() -> impl FnMut(&char) -> bool {
    let (mut in_string, mut escaped) = (false, false);
    move |&c| {
        if in_string {
            (escaped, in_string) = (c == '\\' && !escaped, c != '"' || escaped);
            return true;
        }
        in_string = c == '"';
        !c.is_ascii_whitespace()
    }
}

fn line(out: &mut String, depth: usize) {
    out.push('\n');
    for _ in 0..depth {
        out.push_str("  ");
    }
}

/// At most so many lines, none longer than so many characters. `None`: nothing had to be cut.
pub(crate) fn cut(text: &str, lines_max: usize, characters_max: usize) -> Option<String> {
    let mut shorter = String::new();
    let mut is_cut = false;
    let mut lines = text.lines();
    for line in lines.by_ref().take(lines_max) {
        if !shorter.is_empty() {
            shorter.push('\n');
        }
        match line.char_indices().nth(characters_max) {
            None => shorter.push_str(line),
            Some((end, _)) => {
                is_cut = true;
                shorter.push_str(&line[..end]);
                shorter.push('…');
            }
        }
    }
    let more = lines.count();
    if more > 0 {
        is_cut = true;
        shorter.push_str(&format!("\n… {more} more lines"));
    }
    is_cut.then_some(shorter)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn indents_and_changes_nothing_else() {
        let json = r#"{"a": [1.10, 123456789012345678901234567890], "b\"}": "x, \\", "c": {}, "d": [ ], "e": null}"#;
        let expected = "{\n  \"a\": [\n    1.10,\n    123456789012345678901234567890\n  ],\n  \"b\\\"}\": \"x, \\\\\",\n  \"c\": {},\n  \"d\": [],\n  \"e\": null\n}";
        assert_eq!(indent(json), expected);
        assert_eq!(indent("\"a b\""), "\"a b\"");
        let again: serde_json::Value = serde_json::from_str(&indent(json)).unwrap();
        assert_eq!(again, serde_json::from_str::<serde_json::Value>(json).unwrap());
    }

    #[test]
    fn cuts_lines_and_characters() {
        assert_eq!(cut("a\nb", 2, 1), None);
        assert_eq!(cut("äöü\nb\nc\nd", 2, 2).unwrap(), "äö…\nb\n… 2 more lines");
    }
}
