//! The arguments of `posthouse tenant`.

use clap::{Args, Subcommand};

use super::depth::{Depth, depth};
use super::gate::Closing;

pub(super) const LONG: &str = "Look at tenants, weigh them against each other, pause and resume them.

A tenant needs no settings: it is there as soon as it has a job. Limits for one are set with `posthouse gate set tenant:NAME`, for each \
that has none of its own with `posthouse gate set 'tenant:*'`.";

pub(super) const EXAMPLES: &str = "EXAMPLES:
  posthouse tenant list
  posthouse tenant set acme --weight 3 --max-depth 1000
  posthouse tenant pause acme --for 1h --reason 'too many complaints'
  posthouse tenant resume acme";

#[derive(Debug, Subcommand)]
pub(crate) enum Tenant {
    /// List tenants: weight, jobs, whether they are paused
    ///
    /// Every tenant that has jobs, a weight, a limit of jobs that may wait, or a gate of its own.
    #[command(after_long_help = "EXAMPLES:
  posthouse tenant list
  posthouse tenant list --json | jq -r '.[] | select(.closed_until) | .tenant'")]
    List,
    Set(TenantSet),
    Pause(TenantPause),

    /// Let a paused tenant's jobs run again
    ///
    /// Opens the gate tenant:NAME.
    #[command(after_long_help = "EXAMPLES:
  posthouse tenant resume acme")]
    Resume {
        /// The tenant
        #[arg(value_name = "NAME")]
        tenant: String,
    },
}

/// Set the weight of a tenant, and how many of its jobs may wait
///
/// Where several tenants have due jobs, one with weight 3 gets three times the claims of one with 1, which is what every tenant has
/// that is not set. With --max-depth new jobs of the tenant are refused, whatever their queue, while so many wait; retries are not.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse tenant set acme --weight 3
  posthouse tenant set acme --weight 1              as all others again
  posthouse tenant set acme --max-depth 1000")]
pub(crate) struct TenantSet {
    /// The tenant
    #[arg(value_name = "NAME")]
    pub(crate) tenant: String,
    #[command(flatten)]
    pub(crate) changes: TenantChanges,
}

/// What is set, at least one of them.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub(crate) struct TenantChanges {
    /// From 0.01 to 100
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) weight: Option<f32>,
    /// How many of its jobs may wait before new ones are refused; `none`: any number
    #[arg(long, value_name = "N", value_parser = depth)]
    pub(crate) max_depth: Option<Depth>,
}

/// Keep a tenant's jobs from running
///
/// Closes the gate tenant:NAME: its jobs wait and keep their place, those that run go on, others are not touched. Without --for and
/// --until it lasts until `posthouse tenant resume`.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse tenant pause acme
  posthouse tenant pause acme --for 1h --reason 'too many complaints'")]
pub(crate) struct TenantPause {
    /// The tenant
    #[arg(value_name = "NAME")]
    pub(crate) tenant: String,
    #[command(flatten)]
    pub(crate) closing: Closing,
}
