//go:build languages

package docs_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

// TestOtherLanguages runs the programs of docs/other-languages.md against real servers. The page's blocks in their
// languages are parts of these programs.
func TestOtherLanguages(t *testing.T) {
	t.Parallel()
	examples := filepath.Join(testenv.Root(t), "examples")
	for lang, files := range map[string][]string{
		"python": {"python/publish.py", "python/worker.py"}, "js": {"node/publish.js", "node/worker.js"},
	} {
		var programs strings.Builder
		for _, name := range files {
			programs.WriteString(read(t, filepath.Join(examples, name)))
		}
		text := page{text: read(t, "docs/other-languages.md")}
		for _, b := range text.blocks() {
			if b.lang == lang && !strings.Contains(programs.String(), b.text) {
				t.Errorf("docs/other-languages.md:%d is no part of %s", b.line, files)
			}
		}
	}
	// Debian's modules are those of Debian's python3, which need not be the first one in PATH.
	for interpreter, extension := range map[string]string{"/usr/bin/python3": ".py", "node": ".js"} {
		t.Run(extension, func(t *testing.T) {
			t.Parallel()
			folder := map[string]string{".py": "python", ".js": "node"}[extension]
			testLanguage(t, interpreter, filepath.Join(examples, folder), extension)
		})
	}
}

func testLanguage(t *testing.T, interpreter, dir, extension string) {
	g := newGuide(t)
	g.env["CLAIM_IDLE_MS"] = "150"
	g.db.Exec(t, "CREATE TABLE mail (invoice text, total int CONSTRAINT affordable CHECK (total < 1000))")
	client, stream, group := g.redis.Client, "outbox.invoice", "mailer"
	command := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Env = g.environ()
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s %q: %v", name, args, err)
		}
		return strings.TrimSpace(string(out))
	}
	publish := func(number string, total int) string {
		t.Helper()
		return command(interpreter, filepath.Join(dir, "publish"+extension), number, fmt.Sprint(total))
	}
	posthaste := func(args ...string) string { t.Helper(); return command(testenv.Program(t, ""), args...) }
	mails := func(want ...string) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			got := testenv.Value[[]string](t, g.db, "SELECT array_agg(invoice ORDER BY invoice) FROM mail")
			return testenv.FailIf(!slices.Equal(got, want), "mails for %v, want %v", got, want)
		})
	}
	add := func(stream string, fields ...string) {
		t.Helper()
		must(t, client.XAdd(t.Context(), &redis.XAddArgs{Stream: stream, Values: fields}).Err())
	}

	// A process takes two entries and is killed; one of them is deleted.
	ids := []string{publish("claimed", 1), publish("deleted", 2)}
	must(t, client.XGroupCreateMkStream(t.Context(), stream, group, "0").Err())
	var taken []string
	testenv.Eventually(t, 20*time.Second, func() error {
		got, err := client.XReadGroup(t.Context(), &redis.XReadGroupArgs{
			Group: group, Consumer: "killed", Streams: []string{stream, ">"}, Block: -1,
		}).Result()
		if err == nil {
			for _, m := range got[0].Messages {
				taken = append(taken, m.ID)
				if m.Values["id"] != ids[len(taken)-1] || m.Values["headers"] != `{"tenant": "acme"}` {
					t.Errorf("entry %v is not that of event %s", m.Values, ids[len(taken)-1])
				}
			}
		}
		return testenv.FailIf(len(taken) < 2, "%d entries, %w", len(taken), err)
	})
	must(t, client.XDel(t.Context(), stream, taken[1]).Err())

	log, err := os.Create(filepath.Join(t.TempDir(), "worker.log"))
	must(t, err)
	defer log.Close()
	worker := exec.CommandContext(t.Context(), interpreter, filepath.Join(dir, "worker"+extension))
	worker.Env, worker.Stdout, worker.Stderr = g.environ(), log, log
	worker.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	must(t, worker.Start())
	defer func() {
		_ = worker.Process.Kill()
		_ = worker.Wait()
		if t.Failed() {
			t.Log(read(t, log.Name()))
		}
	}()
	mails("claimed")
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(!strings.Contains(read(t, log.Name()), taken[1]+": trimmed before it was handled"),
			"the worker did not report the deletion of %s", taken[1])
	})

	// An event that fails dies; retried without its cause, it succeeds. The others continue.
	dead := publish("expensive", 2000)
	publish("next", 3)
	mails("claimed", "next")
	testenv.Eventually(t, 20*time.Second, func() error {
		var list []struct {
			ID, Source, Error string
			Attempts          int
			DeadAt            time.Time `json:"dead_at"`
		}
		must(t, json.Unmarshal([]byte(posthaste("dead", "list", "--json")), &list))
		for _, d := range list {
			if d.ID == dead {
				if !strings.Contains(d.Source, group) || d.Attempts != 5 || !strings.Contains(d.Error, "affordable") ||
					time.Since(d.DeadAt) > time.Hour {
					t.Errorf("dead event %+v", d)
				}
				return nil
			}
		}
		return fmt.Errorf("event %s is not dead", dead)
	})
	g.db.Exec(t, "ALTER TABLE mail DROP CONSTRAINT affordable")
	posthaste("dead", "retry", dead)
	mails("claimed", "expensive", "next")

	// A repeat has no effect, nor has an entry that was added again for another group. Shards of the type are read.
	posthaste("replay", "--id="+dead)
	add(stream, "id", uuid.NewString(), "for_group", "other", "data", `{"number":"foreign","total":1}`)
	add(stream+".7", "id", uuid.NewString(), "data", `{"number":"spread","total":1}`)
	must(t, client.Set(t.Context(), stream+"#sharded", "8", 0).Err())
	mails("claimed", "expensive", "next", "spread")
	testenv.Eventually(t, 20*time.Second, func() error {
		groups, err := client.XInfoGroups(t.Context(), stream).Result()
		must(t, err)
		info, err := client.XInfoStream(t.Context(), stream).Result()
		must(t, err)
		return testenv.FailIf(groups[0].Pending != 0 || groups[0].LastDeliveredID != info.LastGeneratedID,
			"%d entries are pending", groups[0].Pending)
	})
	mails("claimed", "expensive", "next", "spread")
}
