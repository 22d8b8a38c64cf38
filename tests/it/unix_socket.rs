//! A database behind a socket file, as on a machine of one's own or beside a cloud's proxy.

use std::path::PathBuf;

use posthouse::store::{Database, Listener, Notice};
use posthouse::{NewJob, Posthouse};
use tokio::net::{TcpStream, UnixListener};

use crate::worker_support::database;

/// A directory with a socket file that leads to a server; removed at the end. Private servers have none of their own.
struct Socket(PathBuf);

impl Socket {
    fn to(address: String) -> Self {
        let directory = std::env::temp_dir().join(format!("ph-socket-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&directory).unwrap();
        let listener = UnixListener::bind(directory.join(".s.PGSQL.5432")).unwrap();
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let mut far = TcpStream::connect(&address).await.unwrap();
                tokio::spawn(async move { tokio::io::copy_bidirectional(&mut near, &mut far).await });
            }
        });
        Self(directory)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_work_with_every_sslmode() {
    let database = database().await;
    let (user, place) = database.url().split_once('@').unwrap();
    let (address, name) = place.split_once('/').unwrap();
    let socket = Socket::to(address.to_owned());
    let directory = socket.0.display();
    for mode in ["", "&sslmode=disable", "&sslmode=prefer", "&sslmode=require", "&sslmode=verify-full"] {
        let url = format!("{user}@/{name}?host={directory}{mode}");
        let queue = Posthouse::connect(&url).await.unwrap();
        let mut listener = Listener::connect(&Database::new(&url).unwrap()).await.unwrap();
        queue.enqueue_job(NewJob::from_json("a", "{}").unwrap()).await.unwrap();
        assert_eq!(listener.next().await.unwrap(), Notice::Wake { queue: "default".to_owned() }, "{mode}");
    }
    // One of several hosts.
    let (user, password) = user.trim_start_matches("postgres://").split_once(':').unwrap();
    let several = format!("host=127.0.0.1,{directory} port=1,5432 user={user} password={password} dbname={name}");
    Posthouse::connect(&several).await.unwrap();
}
