//! Who was told "not now" does not ask again at once, and neither does anybody else: gates of endpoints.
//!
//! What a provider answered closes its endpoint for a time, or until somebody opens it. Where that is kept is behind
//! [`EndpointGates`]: in this process (`local`, for programs without a database), or in the database, where the whole fleet sees
//! it (`database`). `view` is what a process goes by: a copy that is at most a second old. `breaker` notices endpoints
//! that fail without saying "not now".

pub(crate) mod breaker;
mod database;
mod keeper;
mod local;
mod pass;
mod scout;
mod view;

pub use database::DatabaseGates;
pub use keeper::{Closure, EndpointGates, Finding, GateError, Report, Told};
pub use local::LocalGates;
pub(crate) use pass::Pass;
pub(crate) use view::{EndpointGate, Gates, TurnedAway};
