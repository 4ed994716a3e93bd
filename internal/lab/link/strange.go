package link

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha1" //nolint:gosec // it is how Redis names scripts
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Oddities are how a service differs from the Redis that it seems to be. The zero value differs in nothing.
type Oddities struct {
	// Refuse has the error replies to commands ("INFO") and subcommands ("CLIENT SETNAME"), without the leading "-".
	Refuse map[string]string
	// Judge returns the error reply to a call, "" to pass it on. nil passes everything.
	Judge func(args [][]byte) string
	// MaxArgs is the largest number of arguments of a call, with the command; 0: no limit.
	MaxArgs int
	// Identities gives each connection another run_id in INFO; NoHistory removes the replication id as well.
	Identities, NoHistory bool
	// Strict runs scripts as Lua 5.4 names its functions, and refuses keys that a call does not declare.
	Strict bool
}

// Refusals are the commands that services refuse, in words of their own.
var Refusals = map[string]string{
	"INFO": "this command is not available", "CONFIG": "ERR unknown command 'CONFIG', with args beginning with:",
	"CLIENT": "NOPERM this plan has no such command", "CLUSTER": "ERR cluster support is not for you",
	"HELLO": "ERR unsupported", "COMMAND": "nope", "MEMORY": "ERR command is not available: 'MEMORY'",
}

// Strange is a proxy in front of a Redis with oddities. It is safe for concurrent use.
type Strange struct {
	link *Link
	odd  Oddities

	mu      sync.Mutex
	conns   int
	most    int
	scripts map[string]string // by digest
}

// NewStrange returns a proxy on a free port of loopback.
func NewStrange(ctx context.Context, upstream string, odd Oddities) (s *Strange, err error) {
	s = &Strange{odd: odd, scripts: map[string]string{}}
	s.link, err = open(ctx, upstream, func(_ *Link, p *pair) { s.serve(p) })
	return s, err
}

// Addr returns the address to connect to.
func (s *Strange) Addr() string { return s.link.Addr() }

// Close cuts every connection and accepts no more.
func (s *Strange) Close() { s.link.Close() }

// Most returns the largest number of arguments that a call had so far.
func (s *Strange) Most() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.most
}

// answer is what the client gets for a call: own, or the server's reply if that is nil.
type answer struct {
	own  []byte
	info bool
}

func (s *Strange) serve(p *pair) {
	s.mu.Lock()
	s.conns++
	id := s.conns
	s.mu.Unlock()
	answers := make(chan answer, 100_000)
	var both sync.WaitGroup
	both.Go(func() {
		defer close(answers)
		s.calls(bufio.NewReader(p.client), p.server, answers)
	})
	both.Go(func() {
		defer p.close()
		s.replies(bufio.NewReader(p.server), p.client, answers, id)
	})
	both.Wait()
}

// calls passes calls on until the client ends.
func (s *Strange) calls(client *bufio.Reader, server io.Writer, answers chan<- answer) {
	for {
		args, err := readCall(client)
		if err != nil {
			return
		}
		s.mu.Lock()
		s.most = max(s.most, len(args))
		s.mu.Unlock()
		name := strings.ToUpper(string(args[0]))
		if refusal := s.refusal(name, args); refusal != "" {
			answers <- answer{own: []byte("-" + refusal + "\r\n")}
			continue
		}
		if s.odd.Strict {
			var known bool
			if args, known = s.script(name, args); !known {
				answers <- answer{own: []byte("-NOSCRIPT No matching script.\r\n")}
				continue
			}
		}
		answers <- answer{info: name == "INFO"}
		if _, err := server.Write(encodeCall(args)); err != nil {
			return
		}
	}
}

func (s *Strange) refusal(name string, args [][]byte) string {
	if text, ok := s.odd.Refuse[name]; ok {
		return text
	}
	if len(args) > 1 {
		if text, ok := s.odd.Refuse[name+" "+strings.ToUpper(string(args[1]))]; ok {
			return text
		}
	}
	if s.odd.MaxArgs > 0 && len(args) > s.odd.MaxArgs {
		return fmt.Sprintf("ERR this plan allows %d arguments", s.odd.MaxArgs)
	}
	if s.odd.Judge != nil {
		return s.odd.Judge(args)
	}
	return ""
}

//go:embed strict.lua
var strict string

// script puts strict.lua in front of a script. It returns false for a digest that it does not know.
func (s *Strange) script(name string, args [][]byte) ([][]byte, bool) {
	byDigest := strings.HasPrefix(name, "EVALSHA")
	if !byDigest && !strings.HasPrefix(name, "EVAL") || len(args) < 3 {
		return args, true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	text := string(args[1])
	if byDigest {
		known := false
		if text, known = s.scripts[text]; !known {
			return nil, false
		}
	} else {
		sum := sha1.Sum(args[1]) //nolint:gosec // it is how Redis names scripts
		s.scripts[hex.EncodeToString(sum[:])] = text
	}
	args = slices.Clone(args)
	args[0], args[1] = []byte(strings.Replace(name, "EVALSHA", "EVAL", 1)), []byte(strict+text)
	return args, true
}

// replies gives the client its answers, in the order of the calls.
func (s *Strange) replies(server *bufio.Reader, client io.Writer, answers <-chan answer, id int) {
	for a := range answers {
		reply := a.own
		if reply == nil {
			var b bytes.Buffer
			if err := readReply(server, &b); err != nil {
				return
			}
			reply = b.Bytes()
			if a.info {
				reply = s.disguise(reply, id)
			}
		}
		if _, err := client.Write(reply); err != nil {
			return
		}
	}
}

// disguise changes the identity in an answer of INFO. It keeps the length.
func (s *Strange) disguise(info []byte, id int) []byte {
	replace := func(field string) {
		if i := bytes.Index(info, []byte("\n"+field+":")); i >= 0 {
			copy(info[i+len(field)+2:], fmt.Sprintf("%040x", id))
		}
	}
	if s.odd.Identities {
		replace("run_id")
	}
	if s.odd.NoHistory {
		replace("master_replid")
	}
	return info
}

var errProtocol = errors.New("not the protocol of Redis")

// readCall reads a command, which is an array of strings.
func readCall(r *bufio.Reader) ([][]byte, error) {
	n, err := readLength(r, '*')
	if err != nil || n < 1 {
		return nil, errors.Join(errProtocol, err)
	}
	args := make([][]byte, n)
	for i := range args {
		size, err := readLength(r, '$')
		if err != nil || size < 0 {
			return nil, errors.Join(errProtocol, err)
		}
		b := make([]byte, size+2)
		if _, err := io.ReadFull(r, b); err != nil {
			return nil, err
		}
		args[i] = b[:size]
	}
	return args, nil
}

func readLength(r *bufio.Reader, kind byte) (int, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return 0, err
	}
	if line[0] != kind {
		return 0, errProtocol
	}
	return strconv.Atoi(strings.TrimSpace(line[1:]))
}

func encodeCall(args [][]byte) []byte {
	b := fmt.Appendf(nil, "*%d\r\n", len(args))
	for _, a := range args {
		b = fmt.Appendf(b, "$%d\r\n", len(a))
		b = append(append(b, a...), "\r\n"...)
	}
	return b
}

// readReply copies one reply.
func readReply(r *bufio.Reader, to *bytes.Buffer) error {
	line, err := r.ReadBytes('\n')
	if err != nil {
		return err
	}
	to.Write(line)
	n, _ := strconv.Atoi(string(bytes.TrimSpace(line[1:]))) // 0 for replies without a length
	switch line[0] {
	case '$', '=', '!':
		if n >= 0 {
			_, err = io.CopyN(to, r, int64(n)+2)
		}
	case '%':
		err = readReplies(r, to, 2*n)
	case '*', '~', '>':
		err = readReplies(r, to, n)
	}
	return err
}

func readReplies(r *bufio.Reader, to *bytes.Buffer, n int) error {
	for range n {
		if err := readReply(r, to); err != nil {
			return err
		}
	}
	return nil
}
