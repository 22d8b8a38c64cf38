//! What becomes of jobs when processes, servers and wires go down: real worker processes, really killed. Whatever happens,
//! every job ends with exactly one final record, and nothing runs twice without a lost lease.

mod cancel;
mod kill;
mod listen;
mod many;
mod odd_output;
mod pause;
mod postgres;
mod scarce;
mod schedules;
mod shutdown;
mod strangers;
mod support;
mod wire;
