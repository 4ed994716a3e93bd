package consumer_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/consumer/inbox"
	"posthaste/internal/lab/testenv"
)

// childEnv makes the test binary a consumer process instead of a test run; its value is a childConfig.
const childEnv = "POSTHASTE_CONSUMER_CHILD"

// readyLine is the first line of a child: from now on it answers signals.
const readyLine = "ready"

// childConfig says what a child process does.
type childConfig struct {
	Redis, Prefix, Group string
	ClaimIdle            time.Duration
	Workers              int
	Ordered              bool
	// Effect is a database: each event becomes a row of effect, through the inbox. Empty: lines on standard output.
	Effect string
	// FailEvery lets every n-th event fail twice, after its effect.
	FailEvery int
	// Journal is a Redis list to which the handler appends "subject n".
	Journal string
	// DieAt lets the process die in the handler of the event with this n.
	DieAt int
}

func child() int {
	var cfg childConfig
	if err := json.Unmarshal([]byte(os.Getenv(childEnv)), &cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	fmt.Println(readyLine) // before this line a SIGTERM would be the end, not a request
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(3)
	}()
	client := redis.NewClient(&redis.Options{Addr: cfg.Redis})
	defer client.Close()
	h := consumer.LineWriter(os.Stdout)
	if cfg.Effect != "" {
		// a paused process must not block the others
		pool, err := pgxpool.New(ctx, cfg.Effect+"&idle_in_transaction_session_timeout=1000")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 2
		}
		defer pool.Close()
		h = effect(pool, cfg)
	}
	if cfg.Journal != "" {
		h = journal(client, cfg)
	}
	c, err := consumer.New(consumer.Options{
		Client: client, Group: cfg.Group, Prefix: cfg.Prefix, ClaimIdle: cfg.ClaimIdle, Workers: cfg.Workers,
		Ordered: cfg.Ordered, Handler: h, Backoff: func(int) time.Duration { return 10 * time.Millisecond },
	})
	if err == nil {
		err = c.Run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func effect(pool *pgxpool.Pool, cfg childConfig) consumer.Handler {
	return consumer.JSON(func(ctx context.Context, ev consumer.Event, body struct{ N int }) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			first, err := inbox.Once(ctx, tx, cfg.Group, ev.ID)
			if err != nil || !first {
				return err
			}
			if _, err := tx.Exec(ctx, "INSERT INTO effect (id) VALUES ($1)", ev.ID); err != nil {
				return err
			}
			return testenv.FailIf(cfg.FailEvery > 0 && body.N%cfg.FailEvery == 0 && ev.Attempt < 3, "fails twice")
		})
	})
}

func journal(client *redis.Client, cfg childConfig) consumer.Handler {
	return consumer.JSON(func(ctx context.Context, ev consumer.Event, body struct{ N int }) error {
		if cfg.DieAt > 0 && body.N == cfg.DieAt {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		return client.RPush(ctx, cfg.Journal, fmt.Sprintf("%s %d", ev.Subject, body.N)).Err()
	})
}

// process is a running child.
type process struct {
	cmd   *exec.Cmd
	ready chan struct{} // closed at its readyLine
	gone  chan struct{}

	mu  sync.Mutex
	ids map[string]int
}

// spawn starts a child, waits until it answers signals, and collects the ids it prints.
func spawn(tb testing.TB, cfg childConfig) *process {
	tb.Helper()
	env, err := json.Marshal(cfg)
	must(tb, err)
	cmd := exec.Command(os.Args[0]) //nolint:noctx // killed by the test
	p := &process{cmd: cmd, ready: make(chan struct{}), gone: make(chan struct{}), ids: map[string]int{}}
	p.cmd.Env = append(os.Environ(), childEnv+"="+string(env))
	p.cmd.Stderr = os.Stderr
	out, err := p.cmd.StdoutPipe()
	if err == nil {
		_, err = p.cmd.StdinPipe() // held open: the child ends with us, whatever ends us
	}
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		tb.Fatalf("start a child: %v", err)
	}
	go p.read(out)
	tb.Cleanup(p.kill)
	select {
	case <-p.ready:
	case <-p.gone:
		tb.Fatal("a child ended before it was ready")
	}
	return p
}

func (p *process) read(out io.Reader) {
	defer close(p.gone)
	sc := bufio.NewScanner(out)
	for sc.Scan() {
		if sc.Text() == readyLine {
			close(p.ready)
			continue
		}
		var l struct{ ID string }
		if json.Unmarshal(sc.Bytes(), &l) == nil { // the last line of a killed process may be torn
			p.mu.Lock()
			p.ids[l.ID]++
			p.mu.Unlock()
		}
	}
	_ = p.cmd.Wait()
}

// kill ends the process with SIGKILL and waits for it.
func (p *process) kill() {
	_ = p.cmd.Process.Signal(syscall.SIGKILL)
	<-p.gone
}

// stop ends the process in order and waits for it.
func (p *process) stop(tb testing.TB) {
	tb.Helper()
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	<-p.gone
	testenv.Equal(tb, "exit code after SIGTERM", p.cmd.ProcessState.ExitCode(), 0)
}

// printed is how many different events the process has printed.
func (p *process) printed() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.ids)
}
