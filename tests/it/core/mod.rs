//! The queue by its SQL functions, as a program in any language sees it: behaviour, races, plans, the schema itself.

mod alerts;
mod claim;
mod cost;
mod enqueue;
mod gates;
mod gates_closing;
mod gates_explain;
mod gates_many;
mod gates_once;
mod gates_races;
mod gates_rates;
mod gates_support;
mod isolation;
mod lease;
mod operate;
mod plans;
mod python;
mod races;
mod retention;
mod schema;
mod serial;
mod settle;
mod shares;
mod support;
mod sweeps;
mod usage;
