//! `posthouse demo`.

use std::process::ExitCode;

use crate::args::{Global, Demo};
use crate::failure::{Failure, Result};

pub(crate) async fn run(args: Demo, global: &Global) -> Result<ExitCode> {
    Err(Failure::new(format!("{args:?} {global:?}")))
}
