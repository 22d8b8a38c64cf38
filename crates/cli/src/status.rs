//! `posthouse status`.

use std::process::ExitCode;

use crate::args::{Global, Status};
use crate::failure::{Failure, Result};

pub(crate) async fn run(args: Status, global: &Global) -> Result<ExitCode> {
    Err(Failure::new(format!("{args:?} {global:?}")))
}
