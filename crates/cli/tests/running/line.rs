//! A line to Postgres that can be cut.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

#[derive(Default)]
struct State {
    is_cut: bool,
    open: Vec<TcpStream>,
}

/// Passes on what comes, until it is cut.
pub(crate) struct Line {
    /// The database, over this line.
    pub(crate) url: String,
    state: Arc<Mutex<State>>,
}

impl Line {
    /// A line to a database with this URL.
    pub(crate) fn to(url: &str) -> Self {
        let (before, rest) = url.split_once('@').unwrap();
        let (address, after) = rest.split_once('/').unwrap();
        let (listener, address) = (TcpListener::bind("127.0.0.1:0").unwrap(), address.to_owned());
        let url = format!("{before}@{}/{after}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let mut state = shared.lock().unwrap();
                // Whoever comes while it is cut is hung up on.
                let Some(far) = (!state.is_cut).then(|| TcpStream::connect(&address).ok()).flatten() else { continue };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    std::thread::spawn(move || {
                        std::io::copy(&mut from, &mut to).ok();
                        to.shutdown(Shutdown::Both).ok();
                    });
                }
                state.open.extend([near, far]);
            }
        });
        Self { url, state }
    }

    /// Hangs up, and on whoever comes.
    pub(crate) fn cut(&self) {
        let mut state = self.state.lock().unwrap();
        state.is_cut = true;
        for end in state.open.drain(..) {
            end.shutdown(Shutdown::Both).ok();
        }
    }

    /// Takes calls again.
    pub(crate) fn mend(&self) {
        self.state.lock().unwrap().is_cut = false;
    }
}
