//! The texts of the demo: Posthouse's own documents, or the files named by the user, cut into pieces worth a summary.

use std::collections::HashSet;
use std::path::PathBuf;

use crate::failure::{Failure, Result};

/// Enough pieces for several workers to be busy while something goes wrong.
const PIECES_MIN: usize = 24;
/// More would take longer than a demo should.
const PIECES_MAX: usize = 30;
/// A piece that any model can take.
const PIECE_BYTES_MAX: usize = 8_000;
/// A shorter paragraph says too little by itself and joins its neighbour.
const PARAGRAPH_BYTES_MIN: usize = 90;
/// A shorter piece is not cut any further.
const CUT_BYTES_MIN: usize = 240;

const DOCUMENTS: [&str; 4] = [
    include_str!("../../../../README.md"),
    include_str!("../../../../ARCHITECTURE.md"),
    include_str!("../../../../CONTRIBUTING.md"),
    include_str!("../../../../CHANGELOG.md"),
];

/// The pieces, and how many had to be left out.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Texts {
    pub(super) pieces: Vec<String>,
    pub(super) left_out: usize,
}

/// The documents that come with the program.
pub(super) fn own() -> Texts {
    let plain = DOCUMENTS.map(without_marks);
    pieces(&plain.each_ref().map(String::as_str))
}

/// Markdown without bold, code marks and the targets of links, so that a table of it is easy on the eyes.
fn without_marks(document: &str) -> String {
    let mut plain = String::with_capacity(document.len());
    for line in document.lines() {
        let code_fence = line.trim_start().starts_with("```");
        // "**Plans.** A settle …" is a lead-in, not a sentence.
        let line =
            if code_fence { line.to_owned() } else { line.replace(".** ", ": ").replace("**", "").replace('`', "") };
        let mut rest = line.as_str();
        while let Some((before, after)) = rest.split_once("](") {
            let (head, tail) = (before.rsplit_once('[').unwrap_or((before, "")), after.split_once(')'));
            plain.push_str(head.0);
            plain.push_str(head.1);
            rest = tail.map_or("", |(_, tail)| tail);
        }
        plain.push_str(rest);
        plain.push('\n');
    }
    plain
}

/// The user's files.
pub(super) fn from_files(files: &[PathBuf]) -> Result<Texts> {
    let mut documents = Vec::with_capacity(files.len());
    for file in files {
        let bytes = std::fs::read(file).map_err(|error| Failure::usage(format!("{}: {error}", file.display())))?;
        documents.push(String::from_utf8_lossy(&bytes).replace('\0', "\u{fffd}"));
    }
    let documents: Vec<&str> = documents.iter().map(String::as_str).collect();
    let texts = pieces(&documents);
    if texts.pieces.is_empty() {
        return Err(Failure::usage("the files hold no text").hint("name files with some paragraphs in them"));
    }
    Ok(texts)
}

fn pieces(documents: &[&str]) -> Texts {
    let mut pieces: Vec<String> =
        documents.iter().flat_map(|document| paragraphs(document)).flat_map(bounded).collect();
    // Each answer is to be told from all others.
    let mut seen = HashSet::new();
    pieces.retain(|piece| seen.insert(piece.clone()));
    if pieces.len() > PIECES_MAX {
        pieces = joined(pieces);
    }
    while pieces.len() < PIECES_MIN && cut_the_longest(&mut pieces) {}
    let left_out = pieces.len().saturating_sub(PIECES_MAX);
    pieces.truncate(PIECES_MAX);
    Texts { pieces, left_out }
}

/// The paragraphs and list items of a Markdown or plain text, without headings, tables and code.
fn paragraphs(document: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut open = String::new();
    let mut in_code = false;
    // Short ones join the one before; the first has none and waits for the next.
    let mut close = |open: &mut String| {
        let text = std::mem::take(open);
        match found.last_mut() {
            _ if text.is_empty() => {}
            Some(last) if text.len() < PARAGRAPH_BYTES_MIN || last.len() < PARAGRAPH_BYTES_MIN => {
                last.push(' ');
                last.push_str(&text);
            }
            _ => found.push(text),
        }
    };
    for line in document.lines() {
        let text = line.trim();
        if text.starts_with("```") {
            in_code = !in_code;
        }
        let item = list_item(text);
        if in_code || text.is_empty() || text.starts_with(['#', '|', '`']) || item.is_some() {
            close(&mut open);
        }
        if in_code || text.starts_with(['#', '|']) || text.starts_with("```") {
            continue;
        }
        let text = item.unwrap_or(text);
        if !open.is_empty() && !text.is_empty() {
            open.push(' ');
        }
        open.push_str(text);
    }
    close(&mut open);
    found
}

/// A paragraph that is too long for one piece, cut between words.
fn bounded(mut paragraph: String) -> Vec<String> {
    let mut parts = Vec::new();
    while paragraph.len() > PIECE_BYTES_MAX {
        let mut end = PIECE_BYTES_MAX;
        while !paragraph.is_char_boundary(end) {
            end -= 1;
        }
        let end = paragraph[..end].rfind(' ').filter(|&at| at > 0).unwrap_or(end);
        let rest = paragraph.split_off(end);
        parts.push(std::mem::replace(&mut paragraph, rest.trim_start().to_owned()));
    }
    parts.push(paragraph);
    parts
}

/// The text of a list item, without what marks it.
fn list_item(line: &str) -> Option<&str> {
    let unnumbered = line.strip_prefix("- ").or_else(|| line.strip_prefix("* "));
    let numbered = || line.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix(". ");
    unnumbered.or_else(|| numbered().filter(|_| line.starts_with(|c: char| c.is_ascii_digit()))).map(str::trim)
}

/// Neighbours put together until there are few enough.
fn joined(pieces: Vec<String>) -> Vec<String> {
    let total: usize = pieces.iter().map(String::len).sum();
    let enough = (total / PIECES_MAX).min(PIECE_BYTES_MAX);
    let mut surplus = pieces.len() - PIECES_MAX;
    let mut joined: Vec<String> = Vec::new();
    for piece in pieces {
        match joined.last_mut() {
            Some(last) if surplus > 0 && last.len() < enough && last.len() + piece.len() < PIECE_BYTES_MAX => {
                last.push(' ');
                last.push_str(&piece);
                surplus -= 1;
            }
            _ => joined.push(piece),
        }
    }
    joined
}

/// Cuts the longest piece at the end of the sentence nearest to its middle. False if there is nothing worth cutting.
fn cut_the_longest(pieces: &mut Vec<String>) -> bool {
    let mut by_length: Vec<usize> = (0..pieces.len()).filter(|&i| pieces[i].len() >= CUT_BYTES_MIN).collect();
    by_length.sort_unstable_by_key(|&i| std::cmp::Reverse(pieces[i].len()));
    for i in by_length {
        let middle = pieces[i].len() / 2;
        let ends = pieces[i].match_indices(". ").map(|(at, _)| at + 2);
        let Some(end) = ends.min_by_key(|end| end.abs_diff(middle)) else { continue };
        let rest = pieces[i].split_off(end);
        let trimmed = pieces[i].trim_end().len();
        pieces[i].truncate(trimmed);
        // Both halves must differ from all others.
        if rest.is_empty() || pieces.contains(&rest) || pieces.iter().filter(|piece| **piece == pieces[i]).count() > 1 {
            pieces[i].push(' ');
            pieces[i].push_str(&rest);
            continue;
        }
        pieces.insert(i + 1, rest);
        return true;
    }
    false
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_own_documents_make_enough_different_pieces() {
        let texts = own();
        assert!((PIECES_MIN..=PIECES_MAX).contains(&texts.pieces.len()), "{}", texts.pieces.len());
        assert_eq!(texts.pieces.iter().collect::<HashSet<_>>().len(), texts.pieces.len());
        for piece in &texts.pieces {
            assert!(piece.len() >= PARAGRAPH_BYTES_MIN && piece.trim() == piece, "{piece:?}");
        }
        assert_eq!(texts.left_out, 0);
    }

    #[test]
    fn headings_code_and_tables_are_left_out_and_items_stand_alone() {
        let long = "x".repeat(100);
        let document =
            format!("# Title\n\n{long} a\nb\n\n```\ncode\n```\n\n| t | u |\n\n- {long} one\n  more\n1. {long} two\n");
        let expected = [format!("{long} a b"), format!("{long} one more"), format!("{long} two")];
        assert_eq!(paragraphs(&document), expected);
        assert_eq!(paragraphs("short\n\nalso short\n\nmore"), ["short also short more"]);
    }

    #[test]
    fn few_long_texts_are_cut_and_many_short_ones_joined() {
        let sentences: Vec<String> =
            (0..200).map(|i| format!("This is sentence number {i} of a longer text.")).collect();
        assert_eq!(pieces(&[&sentences.join(" ")]).pieces.len(), PIECES_MIN);
        let many: Vec<String> = (0..500).map(|i| format!("{i} {}", "word ".repeat(20))).collect();
        let many = pieces(&[&many.join("\n\n")]);
        assert!(many.pieces.len() <= PIECES_MAX && many.pieces.len() >= PIECES_MIN, "{}", many.pieces.len());
        assert_eq!(many.left_out, 0);
        assert_eq!(pieces(&["one", "one"]).pieces, ["one"]);
        let huge: String = (0..40_000).map(|i| format!("Sentence {i} of a book. ")).collect();
        let huge = pieces(&[&huge]);
        assert!(huge.pieces.iter().all(|piece| piece.len() <= PIECE_BYTES_MAX), "{huge:?}");
        assert!(huge.pieces.len() == PIECES_MAX && huge.left_out > 50, "{}", huge.left_out);
    }
}
