//! The argument of those that limit how many jobs may wait.

/// A number of jobs, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Depth(pub(crate) Option<u32>);

/// Reads it.
pub(super) fn depth(text: &str) -> Result<Depth, String> {
    if text == "none" {
        return Ok(Depth(None));
    }
    let jobs = text.parse().map_err(|_| "a number of jobs is needed, or none".to_owned())?;
    Ok(Depth(Some(jobs)))
}
