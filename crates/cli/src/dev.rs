//! `posthouse dev`.

use std::process::ExitCode;

use crate::args::{Global, Dev};
use crate::failure::{Failure, Result};

pub(crate) async fn run(args: Dev, global: &Global) -> Result<ExitCode> {
    Err(Failure::new(format!("{args:?} {global:?}")))
}
