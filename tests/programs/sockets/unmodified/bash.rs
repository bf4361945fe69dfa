use programs::stage::{MODES, PYTHON, Stage, free_port};

/// Answers each line.
const SERVER: &str = r#"
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    connection, _ = listener.accept()
    with connection:
        rest = b""
        while some := connection.recv(65536):
            *lines, rest = (rest + some).split(b"\n")
            for line in lines:
                connection.sendall(b"answer to " + line + b"\n")
"#;

/// Bash sends with streams of the C library over copies of the connection's descriptor, and receives with `read`.
const CLIENT: &str = r#"
exec 3<>/dev/tcp/127.0.0.1/$1
for ((i = 0; i < 400; i++)); do
    echo "line $i" >&3
    case $((i % 3)) in
    0) read -r line <&3 ;;
    1) read -r -u 3 line ;;
    2) line=$(read -r line <&3; echo "$line") ;;
    esac
    [ "$line" = "answer to line $i" ] || { echo "$i: $line"; exit 1; }
done
printf '%s\n' one two >&3
{ read -r one; read -r two; } <&3
echo "$one, $two"
(echo three; cat /dev/null) >&3
head -n 1 <&3
"#;

#[test]
fn bash() {
    kit::require_programs!(&[PYTHON, "bash"]);
    for mode in MODES {
        let mut stage = Stage::new(mode);
        let port = free_port();
        let at = port.to_string();
        stage.serve(port, &[PYTHON, "-c", SERVER, &at]);
        let out = stage.client(&["bash", "-c", CLIENT, "bash", &at]);
        assert_eq!(out, "answer to one, answer to two\nanswer to three\n", "{mode}");
    }
}
