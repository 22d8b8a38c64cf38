//! `posthouse work --exec`: any program as a handler.
