{{/* Labels of what belongs to a part: (list ROOT ROLE [POOL]). They are its selector, too. */}}
{{- define "outrider.labels" -}}
app.kubernetes.io/part-of: outrider
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
outrider/role: {{ index . 1 }}
{{- if gt (len .) 2 }}
outrider/pool: {{ index . 2 }}
{{- end }}
{{- end }}

{{/* What every pod has. */}}
{{- define "outrider.pod" -}}
automountServiceAccountToken: false
# Else a Service called outrider-gateway would set OUTRIDER_GATEWAY_PORT, a setting of ours.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* What every container has. */}}
{{- define "outrider.container" -}}
imagePullPolicy: IfNotPresent
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* A setting as the text of an environment variable: 1048576, not 1.048576e+06. */}}
{{- define "outrider.text" -}}
{{- if kindIs "string" . }}{{ . | quote }}{{ else }}{{ . | toJson | quote }}{{ end }}
{{- end }}

{{/* Where a pool's workers run. */}}
{{- define "outrider.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .tolerations .gpus }}
tolerations:
  {{- if .gpus }}
  - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
  {{- end }}
  {{- with .tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "outrider.resources" -}}
{{- $amount := dict "cpu" (toString .cpu) "memory" .memory }}
{{- with .gpus }}{{- $_ := set $amount "nvidia.com/gpu" . }}{{- end -}}
requests:
  {{- toYaml $amount | nindent 2 }}
limits:
  {{- toYaml $amount | nindent 2 }}
{{- end }}

{{/* Volumes of a worker, and where they are: (dict "root" ROOT "role" ROLE). */}}
{{- define "outrider.volumes" -}}
- {name: tmp, emptyDir: {sizeLimit: 1Gi}}
- {name: cache, emptyDir: {sizeLimit: {{ .root.Values.cacheSize }}}}
{{- with .root.Values.modelsClaim }}
- {name: models, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
{{- end }}
{{- with .root.Values.secrets }}
{{- if or .tls .hubToken }}
- name: secrets
  projected:
    sources:
      {{- with .tls }}
      - secret: {name: {{ . }}-{{ $.role }}}
      {{- end }}
      {{- with .hubToken }}
      - secret: {name: {{ . }}}
      {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "outrider.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/outrider}
{{- if .Values.modelsClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if or .Values.secrets.tls .Values.secrets.hubToken }}
- {name: secrets, mountPath: /etc/outrider/secrets, readOnly: true}
{{- end }}
{{- end }}

{{/* Target pools by the name of the gateways that serve them, comma-separated pools. */}}
{{- define "outrider.gateways" -}}
{{- $found := dict }}
{{- if .Values.kuberay }}
{{- $_ := set $found (printf "%s-gateway" .Release.Name) "" }}
{{- else }}
{{- range .Values.targets }}
{{- $_ := set $found (printf "%s-gateway-%s" $.Release.Name .name) .name }}
{{- end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* Longer than a worker drains for, by what it takes to end. */}}
{{- define "outrider.grace" -}}
{{- add 60 (ceil (dig "drain_timeout_s" 5 (.settings | default dict))) }}
{{- end }}

{{/* How a probe asks a part for its gRPC health: (list ROOT PORT). Kubernetes asks by itself, but speaks no TLS. */}}
{{- define "outrider.health" -}}
{{- if (index . 0).Values.secrets.tls -}}
exec: {command: [python, deploy/docker/health.py, grpc, "hostname:{{ index . 1 }}"]}
{{- else -}}
grpc: {port: {{ index . 1 }}}
{{- end }}
{{- end }}

{{/* Seconds that a Deployment may make no progress: Kubernetes' own 600, and what workers load. */}}
{{- define "outrider.progress" -}}
{{- add 600 .Values.loadTimeoutSeconds }}
{{- end }}

{{/* Ray's environment, as deploy/docker/node.sh has it. */}}
{{- define "outrider.ray" -}}
# Else Ray takes half a minute to see that a node is gone.
- {name: RAY_health_check_initial_delay_ms, value: "2000"}
- {name: RAY_health_check_period_ms, value: "1000"}
- {name: RAY_health_check_timeout_ms, value: "2000"}
- {name: RAY_health_check_failure_threshold, value: "3"}
# Ray's 15 is for batch jobs: whoever else runs on the machine would come before answers.
- {name: RAY_worker_niceness, value: "0"}
# Ray's logs are in /tmp, and a pod whose /tmp is full is evicted: of each, two files of 8 MiB, not six of 512.
- {name: RAY_ROTATION_MAX_BYTES, value: "8388608"}
- {name: RAY_ROTATION_BACKUP_COUNT, value: "1"}
{{- end }}

{{/* What contradicts itself. */}}
{{- define "outrider.check" -}}
{{- $targets := list }}
{{- range .Values.targets }}{{ $targets = append $targets .name }}{{ end }}
{{- $names := $targets }}
{{- range $draft := .Values.drafts }}
{{- $names = append $names .name }}
{{- range .serves }}
{{- if not (has . $targets) }}
{{- fail (printf "drafts: %s serves %s, which is no target pool; there are %s" $draft.name . (join ", " $targets)) }}
{{- end }}
{{- end }}
{{- end }}
{{- if ne (len $names) (len (uniq $names)) }}{{ fail (printf "two pools have one name: %s" (join ", " $names)) }}{{ end }}
{{- range concat .Values.targets .Values.drafts }}
{{- if regexMatch "^(gateway(-.*)?|head|launcher)$" .name }}
{{- fail (printf "pool %s has a name that gateways, or Ray's head and launcher, have; give it another" .name) }}
{{- end }}
{{- include "outrider.fits" (printf "%s-%s" $.Release.Name .name) }}
{{- include "outrider.ours" (list (printf "pool %s" .name) .settings (list "host" "port" "metrics_port" "tls_dir" "model" "model_name" "serves" "count" "min" "max" "labels" "num_cpus" "num_gpus")) }}
{{- if lt (int (.maxReplicas | default .replicas)) (int .replicas) }}
{{- fail (printf "pool %s has replicas %v, and maxReplicas %v" .name .replicas .maxReplicas) }}
{{- end }}
{{- if and .answersPerReplica $.Values.kuberay }}
{{- fail (printf "pool %s has answersPerReplica, which is for KEDA, and kuberay is on: its launcher scales; leave one out" .name) }}
{{- end }}
{{- if and (not $.Values.kuberay) (ne (not .maxReplicas) (not .answersPerReplica)) }}
{{- fail (printf "pool %s has one of maxReplicas and answersPerReplica: give both, or neither" .name) }}
{{- end }}
{{- if and .maxReplicas (not $.Values.kuberay) (not $.Values.prometheus.monitors) }}
{{- fail (printf "pool %s has maxReplicas, and prometheus.monitors is false, whose labels KEDA's query asks for; set it" .name) }}
{{- end }}
{{- /* No worker has more answers than slots, nor a target more than its gateways give each; and an autoscaler leaves
alone what is a tenth too much. */}}
{{- $most := int (dig "max_slots" 64 (.settings | default dict)) }}
{{- $limit := "max_slots" }}
{{- $given := mul $.Values.gateway.replicas (dig "max_running" 64 $.Values.gateway.settings) }}
{{- if and (not .serves) (lt $given (int64 $most)) }}
{{- $most = $given }}
{{- $limit = "the gateways' max_running" }}
{{- end }}
{{- if and .answersPerReplica (ge (mulf .answersPerReplica 1.1) (float64 $most)) }}
{{- fail (printf "pool %s has answersPerReplica %v, and a worker of it has no more than %d answers, by %s: the pool would never grow; say at most %d, or raise %s" .name .answersPerReplica $most $limit (div (sub (mul 10 $most) 1) 11) $limit) }}
{{- end }}
{{- end }}
{{- if and .Values.kuberay (ne (int .Values.loadTimeoutSeconds) 900) }}
{{- fail (printf "loadTimeoutSeconds is %v, and with kuberay workers have the 900 s of its launcher; leave it out" .Values.loadTimeoutSeconds) }}
{{- end }}
{{- if and .Values.endpointPicker .Values.kuberay (gt (len $targets) 1) }}
{{- fail (printf "endpointPicker is %s, and with kuberay the same gateways serve %s: an InferencePool is of one model; leave it out, or make a release for each" .Values.endpointPicker (join " and " $targets)) }}
{{- end }}
{{- range $name, $_ := include "outrider.gateways" . | fromJson }}{{ include "outrider.fits" $name }}{{ end }}
{{- include "outrider.ours" (list "gateway" .Values.gateway.settings (list "host" "port" "grpc_port" "target" "target_for_draft" "draft" "registry" "model_name" "tls_dir" "public_tls_dir" "api_keys")) }}
{{- end }}

{{/* A Service's name is a label of DNS. */}}
{{- define "outrider.fits" -}}
{{- if gt (len .) 63 }}{{ fail (printf "%s is longer than the 63 characters of a Service's name: shorten the release's or the pool's" .) }}{{ end }}
{{- end }}

{{/* Settings that the chart sets: (list WHOSE SETTINGS OURS). */}}
{{- define "outrider.ours" -}}
{{- range $key, $_ := index . 1 }}
{{- if has $key (index $ 2) }}
{{- fail (printf "%s has the setting %s, which the chart sets from its other values; leave it out" (index $ 0) $key) }}
{{- end }}
{{- end }}
{{- end }}
