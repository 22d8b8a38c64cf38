//! `posthouse enqueue`.

use std::process::ExitCode;

use crate::args::{Global, Enqueue};
use crate::failure::{Failure, Result};

pub(crate) async fn run(args: Enqueue, global: &Global) -> Result<ExitCode> {
    Err(Failure::new(format!("{args:?} {global:?}")))
}
