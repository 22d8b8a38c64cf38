//! A receiver of webhooks: an HTTP server that writes down what it is sent and answers as told, and the check of a signature by
//! nothing but a hash function.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;
use sha2::{Digest, Sha256};

/// A request as it came.
#[derive(Debug, Clone)]
pub(crate) struct Delivery {
    pub(crate) line: String,
    headers: Vec<(String, String)>,
    pub(crate) body: String,
}

/// What to answer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Answer {
    /// A status line, and headers, each ended by CR LF.
    Status(&'static str),
    /// Nothing, until the client gives up.
    Silence,
    /// The connection is closed.
    Closed,
}

#[derive(Default)]
struct Books {
    answers: VecDeque<Answer>,
    deliveries: Vec<Delivery>,
}

/// The server; ends with the test's process.
pub(crate) struct Receiver {
    port: u16,
    books: Arc<Mutex<Books>>,
}

impl Receiver {
    /// Gives these answers, then 204 to all.
    pub(crate) fn start(answers: &[Answer]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let books = Arc::new(Mutex::new(Books { answers: answers.iter().copied().collect(), ..Books::default() }));
        let shared = books.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                let books = shared.clone();
                std::thread::spawn(move || serve(connection, &books));
            }
        });
        Self { port, books }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn deliveries(&self) -> Vec<Delivery> {
        self.books.lock().unwrap().deliveries.clone()
    }
}

fn serve(connection: TcpStream, books: &Mutex<Books>) {
    let mut reader = BufReader::new(connection);
    let mut text = String::new();
    let mut next_line = |reader: &mut BufReader<TcpStream>| {
        text.clear();
        reader.read_line(&mut text).map(|_| text.trim_end().to_owned()).unwrap_or_default()
    };
    let line = next_line(&mut reader);
    let mut headers = Vec::new();
    while let Some((name, value)) = next_line(&mut reader).split_once(": ") {
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    let length =
        headers.iter().find(|(name, _)| name == "content-length").map_or(0, |(_, value)| value.parse().unwrap());
    let mut body = vec![0; length];
    if reader.read_exact(&mut body).is_err() || line.is_empty() {
        return;
    }
    let answer = {
        let mut books = books.lock().unwrap();
        books.deliveries.push(Delivery { line, headers, body: String::from_utf8(body).unwrap() });
        books.answers.pop_front().unwrap_or(Answer::Status("204 No Content\r\n"))
    };
    match answer {
        Answer::Status(status) => {
            write!(reader.get_mut(), "HTTP/1.1 {status}content-length: 0\r\nconnection: close\r\n\r\n").unwrap();
        }
        // It ends when the client does.
        Answer::Silence => drop(reader.read(&mut [0])),
        Answer::Closed => {}
    }
}

impl Delivery {
    pub(crate) fn header(&self, name: &str) -> &str {
        let mut found = self.headers.iter().filter(|(header, _)| header == name);
        let value = &found.next().unwrap_or_else(|| panic!("no {name} in {self:?}")).1;
        assert!(found.next().is_none(), "{name} twice in {self:?}");
        value
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }

    /// Whether it is signed with this secret, and was just now.
    pub(crate) fn is_signed_with(&self, secret: &str) -> bool {
        let timestamp = self.header("webhook-timestamp");
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let age = now.abs_diff(Duration::from_secs(timestamp.parse().unwrap()));
        let expected = signature(secret, self.header("webhook-id"), timestamp, &self.body);
        age < Duration::from_secs(300) && self.header("webhook-signature").split(' ').any(|given| given == expected)
    }
}

/// As the Standard Webhooks specification has it, from SHA-256 up.
fn signature(secret: &str, id: &str, timestamp: &str, body: &str) -> String {
    let mut key = from_base64(secret.strip_prefix("whsec_").unwrap());
    assert!(key.len() <= 64);
    key.resize(64, 0);
    let hash = |pad: u8, message: &[u8]| {
        let padded: Vec<u8> = key.iter().map(|byte| byte ^ pad).chain(message.iter().copied()).collect();
        Sha256::digest(padded).to_vec()
    };
    let mac = hash(0x5c, &hash(0x36, format!("{id}.{timestamp}.{body}").as_bytes()));
    format!("v1,{}", to_base64(&mac))
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn from_base64(text: &str) -> Vec<u8> {
    let sextets = text.bytes().filter(|byte| *byte != b'=').map(|byte| {
        u32::try_from(ALPHABET.iter().position(|letter| *letter == byte).expect("a letter of base64")).unwrap()
    });
    let sextets: Vec<u32> = sextets.collect();
    sextets
        .chunks(4)
        .flat_map(|group| {
            let bits = group.iter().enumerate().fold(0, |bits, (place, sextet)| bits | sextet << (18 - 6 * place));
            bits.to_be_bytes()[1..group.len()].to_vec()
        })
        .collect()
}

fn to_base64(bytes: &[u8]) -> String {
    let group = |three: &[u8]| -> String {
        let bits =
            three.iter().enumerate().fold(0_u32, |bits, (place, byte)| bits | u32::from(*byte) << (16 - 8 * place));
        let letter =
            |place| if place <= three.len() { ALPHABET[(bits >> (18 - 6 * place)) as usize & 63] as char } else { '=' };
        (0..4).map(letter).collect()
    };
    bytes.chunks(3).map(group).collect()
}

#[test]
fn the_check_knows_the_example_of_the_specification() {
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let made = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", r#"{"test": 2432232314}"#);
    assert_eq!(made, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
}
