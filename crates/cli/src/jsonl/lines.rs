//! The lines of a file, as many editors and programs write them: with a byte order mark or carriage returns, blank ones among
//! them, the last one with or without its end.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use crate::failure::{Failure, Result};

/// No line may be longer; a payload may have 32 MiB, and escapes take room.
const LINE_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// The number of a line, and the line, or what is wrong with it if it is too long.
pub(super) type Numbered<'a> = (u64, Result<&'a [u8], String>);

/// Reads line by line.
pub(super) struct Lines {
    from: Box<dyn BufRead>,
    name: String,
    size: Option<u64>,
    number: u64,
    bytes: u64,
    buffer: Vec<u8>,
}

impl Lines {
    /// A file, or standard input for `-`.
    pub(super) fn open(path: &Path) -> Result<Self> {
        if path.as_os_str() == "-" {
            return Ok(Self::new(BufReader::new(io::stdin()), "standard input".to_owned(), None));
        }
        let name = path.display().to_string();
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
        let (data, file) = opened.map_err(|error| Failure::new(format!("cannot read {name}: {error}")))?;
        Ok(Self::new(BufReader::with_capacity(1 << 16, file), name, data.is_file().then_some(data.len())))
    }

    fn new(from: impl BufRead + 'static, name: String, size: Option<u64>) -> Self {
        Self { from: Box::new(from), name, size, number: 0, bytes: 0, buffer: Vec::new() }
    }

    /// The size of the file, where it has one.
    pub(super) fn size(&self) -> Option<u64> {
        self.size
    }

    /// The number of the line read last, from 1.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Bytes read so far.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The next line that is not blank; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Numbered<'_>>> {
        loop {
            let (name, number) = (&self.name, self.number);
            let cannot = |error| Failure::new(format!("cannot read {name} after line {number}: {error}"));
            self.buffer.clear();
            let length =
                (&mut self.from).take(LINE_BYTES_MAX).read_until(b'\n', &mut self.buffer).map_err(cannot)? as u64;
            if length == 0 {
                return Ok(None);
            }
            self.number += 1;
            self.bytes += length;
            if length == LINE_BYTES_MAX && !self.buffer.ends_with(b"\n") {
                self.bytes += skip_line(&mut self.from).map_err(cannot)?;
                return Ok(Some((self.number, Err(format!("longer than {} MiB", LINE_BYTES_MAX >> 20)))));
            }
            if self.number == 1 {
                self.take_mark()?;
            }
            if !self.buffer.trim_ascii().is_empty() {
                return Ok(Some((self.number, Ok(self.buffer.trim_ascii()))));
            }
        }
    }

    /// The byte order mark of UTF-8 says nothing; the ones of UTF-16 say that this is something else.
    fn take_mark(&mut self) -> Result<()> {
        if self.buffer.starts_with(b"\xef\xbb\xbf") {
            self.buffer.drain(..3);
        }
        if self.buffer.starts_with(b"\xff\xfe") || self.buffer.starts_with(b"\xfe\xff") {
            return Err(Failure::new(format!("{} is UTF-16, and must be UTF-8", self.name))
                .hint("convert it first, as with `iconv -f utf-16 -t utf-8 FILE`"));
        }
        Ok(())
    }
}

/// Reads and forgets the rest of a line. Answers how many bytes that was.
fn skip_line(from: &mut impl BufRead) -> io::Result<u64> {
    let mut skipped = 0;
    loop {
        let buffer = from.fill_buf()?;
        let end = buffer.iter().position(|byte| *byte == b'\n');
        let length = end.map_or(buffer.len(), |at| at + 1);
        from.consume(length);
        skipped += length as u64;
        if end.is_some() || length == 0 {
            return Ok(skipped);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(bytes: &'static [u8]) -> Vec<(u64, String)> {
        let mut lines = Lines::new(bytes, "test".to_owned(), None);
        let mut read = Vec::new();
        while let Some((number, line)) = lines.next().unwrap() {
            read.push((number, String::from_utf8(line.unwrap().to_vec()).unwrap()));
        }
        assert_eq!(lines.bytes(), bytes.len() as u64);
        read
    }

    #[test]
    fn marks_blanks_and_line_ends_do_not_matter() {
        let lines = read(b"\xef\xbb\xbf{}\r\n\r\n  \n [1] \n\n3");
        assert_eq!(lines, [(1, "{}".to_owned()), (4, "[1]".to_owned()), (6, "3".to_owned())]);
        assert!(read(b"").is_empty());
        assert!(read(b"\xef\xbb\xbf").is_empty());
    }

    #[test]
    fn another_encoding_is_named() {
        let mut lines = Lines::new(&b"\xff\xfe{\0}\0"[..], "test".to_owned(), None);
        let failure = lines.next().map(|_| ()).unwrap_err();
        assert!(failure.to_string().contains("UTF-16"), "{failure}");
    }

    #[test]
    fn a_line_without_end_is_skipped_and_the_next_one_is_read() {
        let long = io::repeat(b'x').take(LINE_BYTES_MAX + 10).chain(&b"\n{}\n"[..]);
        let mut lines = Lines::new(BufReader::new(long), "test".to_owned(), None);
        assert_eq!(lines.next().unwrap().unwrap().1.unwrap_err(), "longer than 64 MiB");
        assert_eq!(lines.next().unwrap().unwrap().1.unwrap(), b"{}");
        assert_eq!(lines.bytes(), LINE_BYTES_MAX + 14);
    }
}
