//! `posthouse work`.

use std::process::ExitCode;

use crate::args::{Global, Work};
use crate::failure::{Failure, Result};

pub(crate) async fn run(args: Work, global: &Global) -> Result<ExitCode> {
    Err(Failure::new(format!("{args:?} {global:?}")))
}
