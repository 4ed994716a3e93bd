// Package containers_test checks the compose file and the Dockerfile at the root of the repository, and the settings
// they share with the Makefile and .env.example. No container engine is needed.
package containers_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
	"github.com/goccy/go-yaml"
)

// TestMain goes to the root of the repository, which all names are relative to.
func TestMain(m *testing.M) {
	if err := os.Chdir("../.."); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// must ends the test if err is not nil.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// bytesPerEntry is what one stream entry with a 200-byte payload costs Redis, measured.
const bytesPerEntry = 374

// streams is how many full streams Redis must have room for: orders and credits.
const streams = 2

func load(tb testing.TB, profiles ...string) *types.Project {
	tb.Helper()
	return loadWith(tb, cli.WithoutEnvironmentResolution, profiles...)
}

func loadWith(tb testing.TB, environment cli.ProjectOptionsFn, profiles ...string) *types.Project {
	tb.Helper()
	opts, err := cli.NewProjectOptions([]string{"docker-compose.yml"}, environment, cli.WithProfiles(profiles))
	must(tb, err)
	p, err := opts.LoadProject(tb.Context())
	if err != nil {
		tb.Fatalf("docker-compose.yml: %v", err)
	}
	return p
}

func service(tb testing.TB, p *types.Project, name string) types.ServiceConfig {
	tb.Helper()
	s, err := p.GetService(name)
	must(tb, err)
	return s
}

func TestComposeServices(t *testing.T) {
	t.Parallel()
	for profile, want := range map[string][]string{
		"relay":      {"relay"},
		"demo":       {"api", "consumer", "migrate", "postgres", "redis", "relay"},
		"monitoring": {"grafana", "prometheus"},
		"tools":      {"cli"},
	} {
		if got := load(t, profile).ServiceNames(); !slices.Equal(got, want) {
			t.Errorf("profile %s: got %v, want %v", profile, got, want)
		}
	}
}

// TestComposeRelayAlone: the profile relay starts a relay that migrates the outbox, on the servers that .env names.
func TestComposeRelayAlone(t *testing.T) {
	t.Setenv("RELAY_POSTGRES_URL", "postgres://mine")
	t.Setenv("RELAY_REDIS_URL", "redis://mine")
	relay := service(t, loadWith(t, cli.WithOsEnv, "relay"), "relay")
	if !slices.Equal(relay.Command, []string{"relay", "--migrate"}) {
		t.Errorf("it runs %v", relay.Command)
	}
	for name, d := range relay.DependsOn {
		if d.Required {
			t.Errorf("it needs %s", name)
		}
	}
	for key, want := range map[string]string{
		"POSTHASTE_POSTGRES_URL": "postgres://mine", "POSTHASTE_REDIS_URL": "redis://mine",
	} {
		if got := relay.Environment[key]; got == nil || *got != want {
			t.Errorf("%s is not %s", key, want)
		}
	}
}

func TestComposeImagesArePinned(t *testing.T) {
	t.Parallel()
	pinned := regexp.MustCompile(`^[a-z0-9./-]+:v?\d+\.\d+(\.\d+)?$`)
	for name, s := range load(t, "*").Services {
		switch {
		case s.Build != nil:
			if !strings.HasPrefix(s.Image, "posthaste:") {
				t.Errorf("%s is built here, but its image is %q", name, s.Image)
			}
		case !pinned.MatchString(s.Image):
			t.Errorf("%s: image %q has no exact version", name, s.Image)
		}
	}
}

func TestComposeMountsExist(t *testing.T) {
	t.Parallel()
	for name, s := range load(t, "*").Services {
		for _, v := range s.Volumes {
			if v.Type != types.VolumeTypeBind {
				continue
			}
			if _, err := os.Stat(v.Source); err != nil {
				t.Errorf("%s mounts what does not exist: %v", name, err)
			}
			if !v.ReadOnly {
				t.Errorf("%s mounts %s writable", name, v.Source)
			}
		}
	}
}

func TestComposePorts(t *testing.T) {
	t.Parallel()
	seen := map[string]string{}
	for name, s := range load(t, "*").Services {
		for _, p := range s.Ports {
			if p.HostIP != "127.0.0.1" {
				t.Errorf("%s publishes port %s on %q, not on 127.0.0.1", name, p.Published, p.HostIP)
			}
			if other, ok := seen[p.Published]; ok {
				t.Errorf("port %s is published by %s and %s", p.Published, other, name)
			}
			seen[p.Published] = name
		}
	}
	if len(seen) != 7 {
		t.Errorf("got %d published ports, want 7: %v", len(seen), seen)
	}
}

func TestComposeIsHardened(t *testing.T) {
	t.Parallel()
	for name, s := range load(t, "*").Services {
		if !s.ReadOnly {
			t.Errorf("%s: the root file system is writable", name)
		}
		if !slices.Contains(s.CapDrop, "ALL") || len(s.CapAdd) > 0 || s.Privileged {
			t.Errorf("%s keeps capabilities", name)
		}
		if !slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
			t.Errorf("%s may gain privileges", name)
		}
		if uid, _, _ := strings.Cut(s.User, ":"); uid == "0" || uid == "root" {
			t.Errorf("%s runs as root", name)
		}
		if s.Build != nil && s.User != "65532:65532" {
			t.Errorf("%s: got user %q, want 65532:65532", name, s.User)
		}
	}
}

// TestComposeHealth: every lasting service has a health check, and a service that depends on another waits until that
// is healthy or has finished.
func TestComposeHealth(t *testing.T) {
	t.Parallel()
	p := load(t, "demo", "monitoring")
	for name, s := range p.Services {
		oneShot := s.Restart == "no"
		if s.HealthCheck == nil && !oneShot {
			t.Errorf("%s has no health check", name)
		}
		for dep, d := range s.DependsOn {
			want := types.ServiceConditionHealthy
			if service(t, p, dep).Restart == "no" {
				want = types.ServiceConditionCompletedSuccessfully
			}
			if d.Condition != want {
				t.Errorf("%s waits for %s with %q, want %q", name, dep, d.Condition, want)
			}
		}
	}
}

var variable = regexp.MustCompile(`\$\{([A-Z_]+)(?::-([^}$]*))?\}`)

// TestComposeVariables: .env.example has exactly the variables that the compose file reads, with the same defaults.
func TestComposeVariables(t *testing.T) {
	t.Parallel()
	used := map[string]string{}
	for _, m := range variable.FindAllStringSubmatch(read(t, "docker-compose.yml"), -1) {
		if before, ok := used[m[1]]; ok && before != m[2] {
			t.Errorf("%s has two defaults: %q and %q", m[1], before, m[2])
		}
		used[m[1]] = m[2]
	}
	documented := map[string]string{}
	for line := range strings.Lines(read(t, ".env.example")) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(k, "#") {
			documented[k] = v
		}
	}
	for k, v := range used {
		if d, ok := documented[k]; !ok || d != v {
			t.Errorf("%s is %q by default in docker-compose.yml; .env.example has it: %v, as %q", k, v, ok, d)
		}
	}
	for k := range documented {
		if _, ok := used[k]; !ok {
			t.Errorf(".env.example has %s, which docker-compose.yml does not read", k)
		}
	}
}

// TestComposeSettings: every setting given to a container is one that the binary knows; any other would be ignored in
// silence.
func TestComposeSettings(t *testing.T) {
	t.Parallel()
	settings := read(t, "docs/configuration.md")
	for name, s := range load(t, "*").Services {
		if s.Build == nil {
			continue
		}
		for key := range s.Environment {
			if strings.HasPrefix(key, "POSTHASTE_") && !strings.Contains(settings, "| `"+key+"` |") {
				t.Errorf("%s is given %s, which is no setting", name, key)
			}
		}
	}
}

// TestComposeSlotBound: Postgres gives a slot up only far beyond the budget at which a running relay acts.
func TestComposeSlotBound(t *testing.T) {
	t.Parallel()
	p := load(t, "demo", "monitoring")
	budget := size(t, *service(t, p, "relay").Environment["POSTHASTE_WAL_BUDGET"])
	keep := size(t, argument(t, service(t, p, "postgres"), "-cmax_slot_wal_keep_size="))
	if keep < 3*budget {
		t.Errorf("max_slot_wal_keep_size is %d bytes: want at least three times the WAL budget of %d", keep, budget)
	}
	if got := argument(t, service(t, p, "postgres"), "-cwal_level="); got != "logical" {
		t.Errorf("wal_level: got %q, want logical", got)
	}
}

// TestComposeRedisRoom: full streams leave a quarter of Redis' memory free, and Redis evicts nothing and is
// persistent.
func TestComposeRedisRoom(t *testing.T) {
	t.Parallel()
	p := load(t, "demo", "monitoring")
	redis := service(t, p, "redis")
	maxlen, err := strconv.ParseInt(*service(t, p, "relay").Environment["POSTHASTE_STREAM_MAXLEN"], 10, 64)
	must(t, err)
	need, have := streams*maxlen*bytesPerEntry, size(t, following(t, redis, "--maxmemory"))
	if need > have*3/4 {
		t.Errorf("%d streams of %d entries take %d bytes: more than three quarters of maxmemory, %d", streams, maxlen,
			need, have)
	}
	for flag, want := range map[string]string{
		"--appendonly": "yes", "--appendfsync": "everysec",
		"--maxmemory-policy": "noeviction",
	} {
		if got := following(t, redis, flag); got != want {
			t.Errorf("%s: got %q, want %q", flag, got, want)
		}
	}
}

// TestComposeScrapeTargets: Prometheus scrapes the ports that the services listen on, and Grafana queries that
// Prometheus.
func TestComposeScrapeTargets(t *testing.T) {
	t.Parallel()
	p := load(t, "demo", "monitoring")
	var prom struct {
		ScrapeConfigs []struct {
			StaticConfigs []struct {
				Targets []string `yaml:"targets"`
			} `yaml:"static_configs"`
		} `yaml:"scrape_configs"`
	}
	decode(t, "grafana/prometheus/prometheus.yml", &prom)
	var got []string
	for _, c := range prom.ScrapeConfigs {
		for _, s := range c.StaticConfigs {
			got = append(got, s.Targets...)
		}
	}
	want := []string{"localhost:9090"}
	for name, s := range p.Services {
		addr := s.Environment["POSTHASTE_ADMIN_ADDR"]
		if addr == nil {
			continue
		}
		host, port, err := net.SplitHostPort(*addr)
		if err != nil || host != "0.0.0.0" {
			t.Errorf("%s: admin listener %q cannot be reached by Prometheus", name, *addr)
		}
		want = append(want, net.JoinHostPort(name, port))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("scraped: got %v, want %v", got, want)
	}
	var sources struct {
		Datasources []struct {
			URL string `yaml:"url"`
		} `yaml:"datasources"`
	}
	decode(t, "grafana/provisioning/datasources/prometheus.yml", &sources)
	if len(sources.Datasources) != 1 || sources.Datasources[0].URL != "http://prometheus:9090" {
		t.Errorf("datasources: got %+v, want the one at http://prometheus:9090", sources.Datasources)
	}
}

// TestComposeDashboardPaths: Grafana's provider and home dashboard point into what is mounted.
func TestComposeDashboardPaths(t *testing.T) {
	t.Parallel()
	g := service(t, load(t, "monitoring"), "grafana")
	var provider struct {
		Providers []struct {
			Options struct {
				Path string `yaml:"path"`
			} `yaml:"options"`
		} `yaml:"providers"`
	}
	decode(t, "grafana/provisioning/dashboards/posthaste.yml", &provider)
	home := *g.Environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
	b, err := os.ReadFile(filepath.Join("grafana", "dashboards", filepath.Base(home)))
	must(t, err)
	if linked := `"url": "/public/posthaste/runbook.md`; !strings.Contains(string(b), linked) ||
		!slices.ContainsFunc(g.Volumes, func(v types.ServiceVolumeConfig) bool {
			return v.Target == "/usr/share/grafana/public/posthaste" && filepath.Base(v.Source) == "docs"
		}) {
		t.Errorf("the panels' links (%s…) do not lead into docs as it is mounted", linked)
	}
	for _, v := range g.Volumes {
		if len(provider.Providers) == 1 && v.Target == provider.Providers[0].Options.Path &&
			v.Target == filepath.Dir(home) {
			if _, err := os.Stat(filepath.Join(v.Source, filepath.Base(home))); err != nil {
				t.Errorf("home dashboard: %v", err)
			}
			return
		}
	}
	t.Errorf("no mount for provider %+v and home %s", provider, home)
}

func read(tb testing.TB, name string) string {
	tb.Helper()
	b, err := os.ReadFile(name)
	must(tb, err)
	return string(b)
}

func decode(tb testing.TB, name string, into any) {
	tb.Helper()
	if err := yaml.Unmarshal([]byte(read(tb, name)), into); err != nil {
		tb.Fatalf("%s: %v", name, err)
	}
}

// argument returns what follows prefix in the service's command.
func argument(tb testing.TB, s types.ServiceConfig, prefix string) string {
	tb.Helper()
	for _, a := range s.Command {
		if v, ok := strings.CutPrefix(a, prefix); ok {
			return v
		}
	}
	tb.Fatalf("%s has no argument %s", s.Name, prefix)
	return ""
}

// following returns the argument after flag.
func following(tb testing.TB, s types.ServiceConfig, flag string) string {
	tb.Helper()
	i := slices.Index(s.Command, flag)
	if i < 0 || i+1 >= len(s.Command) {
		tb.Fatalf("%s has no argument %s", s.Name, flag)
	}
	return s.Command[i+1]
}

// size reads 4GB (Postgres), 512mb (Redis) and 1GiB (posthaste), which all count in powers of 1024.
func size(tb testing.TB, s string) int64 {
	tb.Helper()
	m := regexp.MustCompile(`(?i)^(\d+)([kmg])i?b$`).FindStringSubmatch(s)
	if m == nil {
		tb.Fatal(fmt.Errorf("size %q", s))
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	must(tb, err)
	return n << (10 * (1 + strings.Index("kmg", strings.ToLower(m[2]))))
}

// TestComposePasswordsAreNoArguments: every user of the host can read command lines, so they contain no password.
// Redis takes any password from the compose file unchanged.
func TestComposePasswordsAreNoArguments(t *testing.T) {
	const secret = `pass "word" #1 $HOME`
	t.Setenv("REDIS_PASSWORD", secret)
	t.Setenv("POSTGRES_PASSWORD", secret)
	p := loadWith(t, cli.WithOsEnv, "*")
	for name, s := range p.Services {
		if strings.Contains(strings.Join(slices.Concat(s.Entrypoint, s.Command), " "), secret) {
			t.Errorf("the command line of %s has the password", name)
		}
	}
	dir, s := t.TempDir(), service(t, p, "redis")
	var args []string
	for _, a := range s.Entrypoint {
		args = append(args, strings.ReplaceAll(a, "/tmp/", dir+"/"))
	}
	socket := filepath.Join(dir, "s")
	args = append(args, "--port", "0", "--unixsocket", socket, "--dir", dir)
	server := exec.CommandContext(t.Context(), args[0], args[1:]...)
	server.Env = append(os.Environ(), "REDISCLI_AUTH="+*s.Environment["REDISCLI_AUTH"])
	must(t, server.Start())
	t.Cleanup(func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	})
	ping := func(password string) string {
		cmd := exec.CommandContext(t.Context(), "redis-cli", "-s", socket, "ping")
		cmd.Env = append(os.Environ(), "REDISCLI_AUTH="+password)
		out, _ := cmd.CombinedOutput()
		return strings.TrimSpace(string(out))
	}
	for range 100 {
		if ping(secret) == "PONG" {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if out := ping(secret); out != "PONG" {
		t.Errorf("with the password: %q", out)
	}
	if out := ping("another"); strings.Contains(out, "PONG") {
		t.Errorf("with another password: %q", out)
	}
}
